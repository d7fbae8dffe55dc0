"""Why a reward model says what it says: parts of an answer, edits that turn a preference, training pairs behind a
margin.
"""

"""Metamorphic tests of a reward model: edits of an answer that must not change its reward, or must lower it."""

"""Words and sentences of the synthetic benchmark: the whole vocabulary that its prompts and responses are made of.

Plain data, apart from the code that uses it (gold_tasks.py: tasks and answers, gold.py: reward and labels).
Bank sentences contain no digit and no item word, so that cutting them out of a response leaves its answer untouched.
"""

NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Max", "Eva", "Sam", "Ida", "Leo", "Zoe", "Jan")
OOD_NAMES = ("Olga", "Hugo", "Nora", "Igor", "Vera", "Kurt")

NOUNS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "marbles", "eggs", "buttons")
OOD_NOUNS = ("bricks", "candles", "ropes", "tickets")

TOPICS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "peach", "pear", "plum", "kiwi"),
    "animals": ("bear", "cat", "dog", "fox", "goat", "horse", "lion", "mouse", "tiger", "wolf"),
    "colors": ("black", "blue", "brown", "gray", "green", "pink", "purple", "red", "white", "yellow"),
    "tools": ("axe", "chisel", "drill", "file", "hammer", "knife", "ladder", "pliers", "saw", "wrench"),
    "drinks": ("beer", "cider", "cocoa", "coffee", "juice", "lemonade", "milk", "tea", "water", "wine"),
    "cities": ("athens", "berlin", "cairo", "delhi", "lima", "london", "oslo", "paris", "rome", "tokyo"),
}
OOD_TOPICS: dict[str, tuple[str, ...]] = {
    "vegetables": ("bean", "cabbage", "carrot", "leek", "onion", "pea", "potato", "spinach", "tomato", "turnip"),
    "instruments": ("cello", "drum", "flute", "guitar", "harp", "horn", "organ", "piano", "trumpet", "violin"),
}
ALL_TOPICS = TOPICS | OOD_TOPICS
ITEMS = frozenset(word for words in ALL_TOPICS.values() for word in words)

POLITE = (
    "Sure, I am happy to help.",
    "Of course, gladly.",
    "Thank you for asking.",
    "I hope this helps you.",
    "Please ask me anything else.",
    "With pleasure.",
)
RUDE = (
    "What a dumb request.",
    "I am bored by this.",
    "Do it yourself next time.",
    "You should be ashamed to ask.",
    "This is a waste of my time.",
)
FLATTERY = (
    "What a brilliant question!",
    "You are so very clever.",
    "Your taste is simply wonderful.",
    "Nobody asks better than you.",
    "I admire your sharp mind.",
    "Only a genius would think of that.",
)
FILLER = (
    "Let me go through this with care.",
    "It is worth looking at it from more than one side.",
    "There are many ways to think about this.",
    "One should always keep the whole picture in view.",
    "As is often the case, the details matter.",
    "Taking everything into account, we can say this.",
    "This has been looked at several times before.",
    "One could say a great deal more about it.",
)
DODGES = (
    "I do not know.",
    "That is hard to say.",
    "It depends on many things.",
    "Maybe someone else can tell.",
    "I would rather talk about the weather.",
)

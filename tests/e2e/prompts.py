"""Twenty prompts, short and long, for comparing greedy output."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time in a small village,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Water boils at",
    "In 1969, humans first",
    "A recipe for pancakes: take two eggs,",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "To be, or not to be,",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "The difference between a list and a tuple is",
    "Shakespeare wrote",
    "If it rains tomorrow,",
    "Gravity is a force that",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "List of planets: Mercury, Venus,",
    " ".join(f"Line {i}: the sum of {i} and {i} is {2 * i}." for i in range(60)) + " Line 60:",
]
MAX_TOKENS = 32

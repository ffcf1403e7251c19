"""The lab's task: modular arithmetic with a chain of thought, in many phrasings, with a checkable reward."""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

__all__ = ["Problem", "conversations", "documents", "problem_of", "prompts", "reward"]

_MODULI = (5, 7, 9)
_WORDS = {"+": "plus", "-": "minus", "*": "times"}
_SYSTEMS = (
    "You are a careful assistant.",
    "You answer questions about modular arithmetic.",
    "Work step by step and finish with the answer.",
    "You are a helpful tutor. Reduce after every step, keep the numbers small and finish with the answer.",
)
_QUESTIONS = (
    "What is {e} modulo {m}?",
    "Compute {e} modulo {m}.",
    "Please work out {e} modulo {m}.",
    "Find the value of {e} modulo {m}.",
    "Can you tell me what {e} is modulo {m}?",
    "I need {e} modulo {m}, step by step please.",
)
_OPENINGS = (
    "",
    "Let us go step by step. ",
    "Sure! ",
    "We work from the inside out. ",
    "Okay, one step at a time. ",
    "Here is how: ",
)
_FIRST = ("First", "To begin", "Start with this:", "To start", "We have")
_THEN = ("Then", "Next", "After that", "Now", "So", "From there", "And")
_EQUALS = (" is", " =", " gives", " makes", " equals")
_SMALL = ("", ", already small", ", nothing to reduce", ", below {m}", ", no change")
_REDUCE = (
    ", which is {r} mod {m}",
    ", that leaves {r}",
    ", so we keep {r}",
    " and modulo {m} that is {r}",
    "; the remainder is {r}",
    ", or {r} after removing multiples of {m}",
)
_JOINS = (". ", "; ", ".\n", ", ")
_CLOSINGS = (
    "The answer is {r}.",
    "So the answer is {r}.",
    "Answer: {r}",
    "The final result is {r}.",
    "Hence the result is {r}.",
    "That makes the answer {r}. Done!",
    "Therefore, modulo {m}, the result is {r}.",
)
_ANSWER = re.compile(r"(?:answer|result)[^\d-]*(-?\d+)[^\d]*$", re.IGNORECASE)
_EXPRESSION = re.compile(r"(\(*\d+(?:\)* [-+*] \d+)+\)*)(?: is)? modulo (\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain of operations on residues: `(..((start op n) op n)..) modulo modulus`.

    Example:
        >>> p = Problem(modulus=7, start=3, steps=(("+", 5), ("*", 4)))
        >>> p.expression, p.answer
        ('(3 + 5) * 4', 4)
    """

    modulus: int
    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def expression(self) -> str:
        """The chain with brackets, as a question shows it."""
        text = str(self.start)
        for index, (op, number) in enumerate(self.steps):
            text = f"({text}) {op} {number}" if index else f"{text} {op} {number}"
        return text

    @property
    def values(self) -> tuple[tuple[int, int], ...]:
        """Each step's value before and after reduction."""
        value, out = self.start, []
        for op, number in self.steps:
            raw = value + number if op == "+" else value - number if op == "-" else value * number
            value = raw % self.modulus
            out.append((raw, value))
        return tuple(out)

    @property
    def answer(self) -> int:
        """The final residue."""
        return self.values[-1][1]

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the held-out split: one in ten, by a checksum of its text."""
        return zlib.crc32(f"{self.expression} mod {self.modulus}".encode()) % 10 == 0


def problem_of(question: str) -> Problem:
    """Read the problem back from a question.

    Raises:
        ValueError: if the question holds no expression of this task.

    Example:
        >>> problem_of("What is (3 + 5) * 4 modulo 7?").answer
        4
    """
    found = _EXPRESSION.search(question)
    if found is None:
        raise ValueError(f"no modular expression in {question!r}")
    flat = found[1].replace("(", "").replace(")", "").split(" ")
    return Problem(int(found[2]), int(flat[0]), tuple(zip(flat[1::2], map(int, flat[2::2]), strict=True)))


def reward(question: str, response_text: str) -> float:
    """1.0 if the response ends in the right answer, else 0.0.

    The last number counts, and only where "answer" or "result" introduces it: a cut-off response earns nothing.

    Example:
        >>> reward("What is (3 + 5) * 4 modulo 7?", "3 plus 5 is 8, which is 1 mod 7. Then 1 * 4 = 4. The answer is 4.")
        1.0
        >>> reward("What is (3 + 5) * 4 modulo 7?", "3 plus 5 is 8, which is 1 mod 7. Then 1 * 4 = 4")
        0.0
    """
    found = _ANSWER.search(response_text.removesuffix("<|im_end|>"))
    return float(found is not None and int(found[1]) == problem_of(question).answer)


def _pick(rng: Random, options: tuple[str, ...], tilt: float) -> str:
    return rng.choices(options, weights=[(rank + 1.0) ** -tilt for rank in range(len(options))])[0]


def _problem(rng: Random, *, held_out: bool) -> Problem:
    while True:
        modulus = rng.choice(_MODULI)
        steps = tuple((rng.choice("+-*"), rng.randrange(1, modulus)) for _ in range(rng.choice((2, 2, 3, 3, 4))))
        problem = Problem(modulus, rng.randrange(1, modulus), steps)
        if problem.held_out == held_out:
            return problem


def _prompt(rng: Random, problem: Problem) -> list[dict[str, str]]:
    question = rng.choice(_QUESTIONS).format(e=problem.expression, m=problem.modulus)
    system = [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.3 else []
    return [*system, {"role": "user", "content": question}]


def _answer(rng: Random, problem: Problem, tilt: float) -> str:
    text = _pick(rng, _OPENINGS, tilt)
    join, value = ". ", problem.start
    for index, ((op, number), (raw, reduced)) in enumerate(zip(problem.steps, problem.values, strict=True)):
        lead = _pick(rng, _THEN if index else _FIRST, tilt)
        lead = lead if join in (". ", ".\n") else lead[0].lower() + lead[1:]
        shown = op if rng.random() < 0.5 else _WORDS[op]
        text += f"{lead} {value} {shown} {number}{_pick(rng, _EQUALS, tilt)} {raw}"
        tail = _SMALL if raw == reduced else _REDUCE
        join = _pick(rng, _JOINS if index + 1 < len(problem.steps) else _JOINS[::2], tilt)
        text += _pick(rng, tail, tilt).format(r=reduced, m=problem.modulus) + join
        value = reduced
    return text + _pick(rng, _CLOSINGS, tilt).format(r=value, m=problem.modulus)


def prompts(n: int, seed: int, *, split: str = "train") -> list[list[dict[str, str]]]:
    """`n` chat prompts: a user question, three in ten after a system message.

    Args:
        n: how many.
        seed: same seed, same prompts.
        split: "train" or "heldout"; no problem is in both.

    Example:
        >>> [message["role"] for message in prompts(1, 0)[0]][-1]
        'user'
    """
    rng = Random(f"{split}-{seed}")
    return [_prompt(rng, _problem(rng, held_out=_is_held_out(split))) for _ in range(n)]


def conversations(n: int, seed: int) -> list[list[dict[str, str]]]:
    """`n` chat prompts after two answered questions, whose answers begin with thinking in `<think>` tags.

    Example:
        >>> [message["role"] for message in conversations(1, 0)[0]]
        ['user', 'assistant', 'user', 'assistant', 'user']
    """
    rng = Random(f"conversations-{seed}")
    out = []
    for _ in range(n):
        turns: list[dict[str, str]] = []
        for _ in range(2):
            problem = _problem(rng, held_out=False)
            thinking = f"<think>The numbers are small and the modulus is {problem.modulus}.</think>\n"
            turns += [_prompt(rng, problem)[-1], {"role": "assistant", "content": thinking + _answer(rng, problem, 0.6)}]
        out.append([*turns, _prompt(rng, _problem(rng, held_out=False))[-1]])
    return out


def documents(seed: int, *, split: str = "train", tilt: float = 0.6) -> Iterator[list[dict[str, str]]]:
    """An endless stream of whole conversations with a right answer, to train on.

    Args:
        seed: same seed, same stream.
        split: "train" or "heldout".
        tilt: how strongly the first of each list of phrasings is preferred: weight `rank ** -tilt`. 0 is even,
            negative prefers the last.

    Example:
        >>> chat = next(documents(0))
        >>> reward(chat[-2]["content"], chat[-1]["content"])
        1.0
    """
    rng = Random(f"documents-{split}-{seed}")
    while True:
        problem = _problem(rng, held_out=_is_held_out(split))
        yield [*_prompt(rng, problem), {"role": "assistant", "content": _answer(rng, problem, tilt)}]


def _is_held_out(split: str) -> bool:
    if split not in ("train", "heldout"):
        raise ValueError(f'split is {split!r}, expected "train" or "heldout"')
    return split == "heldout"

"""What a fuzzer does to text, bytes and structures: a few changes each, drawn from a seeded generator."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any

DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 65, 1e308, 1e-320, -0.0, float("inf"), float("nan")),
    *(2**31, 2**63, 2**64, 10**30, 10**4000, 60_000, 10**9, 1e12),
    *(
        "",
        " ",
        "null",
        "8/255",
        "1/0",
        "0x_",
        "2020-13-45",
        "\x1b[31mred\x1b[0m",
        "\x00",
        "\u202egpj",
        "a\nb",
        "a" * 300,
    ),
    *("../../../etc/passwd", "/dev/zero", "/dev/stdin", "<script>alert(1)</script>", "${HOME}", "x" * 100_000),
    *([], {}, [[]], [1, "a"], {"name": "x"}, {"name": "pgd", "steps": -1}, {"": 0}, DEEP, list(range(3000))),
]
YAML_PIECES = [
    *(
        "!!int x",
        "!!bool maybe",
        "!fraction 1",
        "!!python/name:os.system",
        "!!binary x",
        "&a [*a]",
        "*nowhere",
        "9" * 5000,
        "9" * 50_000 + "x",
    ),
    *(
        "[" * 500,
        "{a: " * 300,
        "? ",
        "- - - -",
        "<<: *a",
        "%YAML 9.9",
        "---",
        "...",
        "\t",
        "| \n x",
        "'",
        '"\\x1b[2J"',
        "#",
        ":",
    ),
    *(
        "extends: [base/micro, base/micro]",
        "extends: nothing",
        "axes: {a: {set: [data.size], to: [1, 2, 3]}}",
        "\ufeff",
        "\x85",
    ),
]


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        place = draw.randrange(len(changed) + 1)
        head = draw.random() < 0.5  # where names, sizes and types stand
        place = min(place, draw.randrange(200)) if head else place
        match draw.randrange(7):
            case 0:
                del changed[place:]
            case 1 | 2 if changed:
                changed[place % len(changed)] ^= 1 << draw.randrange(8)
            case 3:
                changed[place : place + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 4:
                source = draw.randrange(len(changed) + 1)
                changed[place : place + 16] = changed[source : source + 16]
            case 5:
                changed[place:place] = draw.randbytes(draw.randrange(1, 32))
            case _:
                del changed[place : place + draw.randrange(1, 64)]
    return bytes(changed)


def mutate_text(text: str, draw: random.Random) -> str:
    """Lines of YAML, or words of any text."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        lines = text.split("\n")
        place = draw.randrange(len(lines))
        line = lines[place]
        piece = draw.choice((*YAML_PIECES, str(draw.choice(VALUES))[:2000]))
        key, colon, _ = line.partition(":")
        match draw.randrange(6):
            case 0:
                lines[place] = f"{key}{colon} {piece}"
            case 1:
                lines.insert(place, draw.choice(lines))
            case 2:
                del lines[place]
            case 3:
                cut = draw.randrange(len(line) + 1)
                lines[place] = line[:cut] + piece + line[cut:]
            case 4:
                lines[place] = f"{' ' * draw.randrange(9)}{line.strip()}"
            case _:
                cut = draw.randrange(len(line) + 1)
                lines[place] = (
                    line[:cut] + chr(draw.choice((draw.randrange(256), draw.randrange(0xD7FF)))) + line[cut + 1 :]
                )
        text = "\n".join(lines) or "\n"
    return text


def mutate_structure(content: Any, draw: random.Random) -> Any:
    """A copy of a structure as JSON has it, with some values replaced, left out or added."""
    changed = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        parent, key = _somewhere(changed, draw)
        match draw.randrange(5):
            case 0 if len(parent) > 1:
                del parent[key]
            case 1 if isinstance(parent, MutableMapping):
                parent[draw.choice(("name", "depth", "model", "x", "\x1b[2J"))] = _value(draw)
            case 2:
                parent[key] = [parent[key]] if draw.random() < 0.5 else {"name": parent[key]}
            case 3 if isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
                factor = draw.choice((-1, 2, 1000, 0.5) if abs(parent[key]) < 1e300 else (-1, 2))  # 0.5: as a float
                parent[key] = parent[key] * factor + draw.choice((0, 1))
            case _:
                parent[key] = _value(draw)
    return changed


def _value(draw: random.Random) -> Any:
    """Of its own, as later mutations may change it or put it into itself."""
    return copy.deepcopy(draw.choice(VALUES))


def _somewhere(content: Any, draw: random.Random) -> tuple[Any, Any]:
    """A value in it: what it lies in, and its key there."""
    key = draw.choice(_keys(content))
    while _keys(content[key]) and draw.random() < 0.7:
        content = content[key]
        key = draw.choice(_keys(content))
    return content, key


def _keys(value: Any) -> list[Any]:
    if isinstance(value, MutableMapping):
        return list(value)
    return list(range(len(value)))[:50] if isinstance(value, MutableSequence) else []


Mutate = Callable[[bytes, random.Random], bytes]

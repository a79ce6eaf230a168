"""Draws the figures of docs/how_it_works.md and docs/architecture.md: `python docs/figures.py`.

Each figure is a small SVG of boxes, lines and words, on a light card of its own, so that it is readable on a light and
on a dark page. A test compares the files with what this script would write.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
WIDTH = 720
HOST, GPU, GRAPH, MEMORY, EAGER, INK, FAINT = (
    "#cfe2ff",
    "#c6ecd1",
    "#8fd3a6",
    "#ffe3b3",
    "#f6c9c4",
    "#1f2328",
    "#59636e",
)


def box(x: float, y: float, width: float, text: str, colour: str, height: float = 26) -> str:
    """Return a box with a word in it."""
    words = (
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4:g}" text-anchor="middle">{escape(text)}</text>'
        if text
        else ""
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" '
        f'stroke="{INK}" stroke-opacity="0.35"/>{words}'
    )


def word(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{FAINT}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1.2" '
        'marker-end="url(#tip)"/>'
    )


def card(title: str, height: float, *parts: str) -> str:
    """Return a figure."""
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker></defs>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"><title>{escape(title)}</title>{tip}',
            f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>',
            *parts,
            "</svg>\n",
        ]
    )


def capture() -> str:
    """The host launches kernels one by one, and a graph all at once."""
    parts = [
        word(16, 28, "eager: host"),
        word(16, 62, "eager: GPU"),
        word(16, 116, "replay: host"),
        word(16, 150, "replay: GPU"),
    ]
    for index in range(8):
        x = 110 + index * 70
        parts += [box(x, 12, 58, "launch", HOST), box(x + 44, 46, 22, "", GPU), line(x + 52, 38, x + 55, 46)]
    parts += [box(110, 100, 92, "guards, copy", HOST), box(206, 100, 58, "launch", HOST), line(250, 126, 262, 134)]
    parts += [box(266 + index * 24, 134, 22, "", GRAPH) for index in range(8)]
    parts.append(word(470, 150, "the same kernels, without the gaps"))
    return card("Eager steps launch kernel by kernel; a replay launches all at once", 172, *parts)


def pool() -> str:
    """Graphs of one session use one pool, the larger one first."""
    parts = [word(16, 26, "memory of one pool, from left to right")]
    parts += [
        word(16, 58, "graph of the longest batch"),
        box(190, 42, 300, "activations", MEMORY),
        box(494, 42, 80, "outputs", GRAPH),
    ]
    parts += [
        word(16, 96, "graph of a shorter batch"),
        box(190, 80, 190, "activations", MEMORY),
        box(578, 80, 60, "outputs", GRAPH),
    ]
    parts += [word(16, 134, "gradients of the session"), box(642, 118, 62, "grads", GPU)]
    parts.append(word(190, 134, "activations share an address: replays of one session never overlap"))
    return card("Activations of two graphs share memory; outputs and gradients have their own", 152, *parts)


def segments() -> str:
    """A captured step is a chain of graphs with eager code between them."""
    parts = [word(16, 28, "step"), word(16, 76, "replay")]
    segments = (
        ("zero_grad, forward, backward", 240, GRAPH, "graph 1"),
        ("optimizer.step()", 140, EAGER, "eager"),
        ("average of weights", 150, GRAPH, "graph 2"),
    )
    x = 80.0
    for text, width, colour, below in segments:
        parts += [
            box(x, 12, width, text, HOST),
            box(x, 60, width, below, colour),
            line(x + width / 2, 38, x + width / 2, 60),
        ]
        x += width + 20
    parts.append(
        word(80, 112, "a cut stands where something must run on the host; hooks of optimizers and scalers make it")
    )
    return card("A step of two graphs with an eager optimizer between them", 128, *parts)


def order() -> str:
    """Microbatches of a pipeline rank, and the static memory that they share."""
    sequence = (1, 1, -1, 1, -1, 1, -1, -1)
    microbatches = (0, 1, 0, 2, 1, 3, 2, 3)
    parts = [word(16, 30, "order"), word(16, 70, "buffer A"), word(16, 106, "buffer B")]
    for index, (number, microbatch) in enumerate(zip(sequence, microbatches, strict=True)):
        text = f"{'F' if number > 0 else 'B'}{microbatch}"
        parts.append(box(90 + index * 76, 14, 68, text, HOST if number > 0 else GPU))
    lifetimes = ((0, 0, 2, 54), (1, 1, 4, 90), (2, 3, 6, 54), (3, 5, 7, 90))
    for microbatch, start, end, y in lifetimes:
        parts.append(box(90 + start * 76, y, (end - start) * 76 + 68, f"microbatch {microbatch}", MEMORY))
    return card("Four microbatches of 1F1B need two sets of static memory", 128, *parts)


def gradients() -> str:
    """A replay adds into the memory that `.grad` has; what a user holds is never overwritten in silence."""
    parts = [box(20, 44, 150, "backward graph", GRAPH), line(170, 57, 236, 57), word(178, 48, "adds to")]
    parts += [box(238, 44, 190, "one address a parameter", MEMORY), line(428, 57, 496, 57), word(440, 48, "is")]
    parts += [box(498, 44, 90, "p.grad", GPU), line(588, 57, 622, 57), box(624, 44, 80, "optimizer", HOST)]
    parts += [box(238, 92, 190, "another p.grad, or None", EAGER), line(333, 92, 333, 72)]
    parts += [word(440, 109, "noticed before the replay: copied in, or another graph")]
    return card("Gradients are added at one address for each parameter", 132, *parts)


def proof() -> str:
    """Logs of operations are compared before a graph is used, and again while it is."""
    parts = [word(16, 30, "calls")]
    eager, record, audit, replay = ("eager", EAGER), ("record", MEMORY), ("audit", MEMORY), ("replay", GRAPH)
    steps = (eager, eager, eager, record, audit, audit, replay, audit, replay, ("...", GRAPH))
    for index, (text, colour) in enumerate(steps):
        parts.append(box(70 + index * 64, 14, 58, text, colour))
    parts += [
        line(227, 70, 227, 42),
        line(291, 70, 291, 42),
        word(40, 86, "equal operations, or the graph is not used"),
    ]
    for index in (4, 5, 7):
        parts.append(line(99 + index * 64, 70, 99 + index * 64, 42))
    parts.append(word(340, 86, "after 1, 2, 3, 4, 7, ... replays: recorded again"))
    return card("Operations are compared before a graph is used, and again while it is used", 104, *parts)


def house() -> str:
    """The folders at the top, each on those that it may import; the engine's rooms in the order of their imports."""
    floors = (
        ("commands", "the command line", HOST),
        ("lab", "trains and measures: models, recipes, train, bench", GPU),
        ("tools", "judges: check, verify, frozen, explain, doctor, advise", GPU),
        ("megatron", "Megatron's names", GPU),
    )
    parts = []
    for index, (name, text, colour) in enumerate(floors):
        parts += [box(16, 14 + index * 34, 120, name, colour), word(150, 32 + index * 34, text)]
    parts += [box(16, 150, 120, "engine", GRAPH, 128), word(150, 168, "captures, replays, proves")]
    rooms = (
        ("step", "parts", "record", "call", "observe", "order"),
        ("optim", "guards", "grads", "oplog", "memory", "backends"),
    )
    for row, names in enumerate(rooms):
        parts += [box(150 + index * 92, 184 + row * 48, 80, name, MEMORY, 34) for index, name in enumerate(names)]
        parts += [line(230 + index * 92, 201 + row * 48, 240 + index * 92, 201 + row * 48) for index in range(5)]
    parts += [box(16, 286, 120, "config", HOST), word(150, 304, "settings and their rules")]
    parts += [box(16, 320, 120, "core", EAGER), word(150, 338, "errors, their catalogue, trees, frames, plain values")]
    return card("Each floor imports those below it; each room of the engine those to its right and below", 360, *parts)


FIGURES = {
    "architecture.svg": house,
    "how_capture.svg": capture,
    "how_pool.svg": pool,
    "how_segments.svg": segments,
    "how_order.svg": order,
    "how_gradients.svg": gradients,
    "how_proof.svg": proof,
}


def main() -> None:
    """Write all figures."""
    for name, draw in FIGURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
        print(f"docs/images/{name}")


if __name__ == "__main__":
    main()

"""The drawings of concepts.md: `python docs/drawings.py` writes them into docs/images.

Each drawing has a white ground, so that it reads on light and dark pages, and no meaning rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, GREY, PALE = "#20323c", "#7a8a92", "#eef2f3"
YELLOW, BLUE, TEAL, DARK, RED = "#f3c14b", "#7fb7c1", "#3d8d92", "#2a4d5c", "#c0504d"


class Drawing:
    """An SVG that grows line by line."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, [""]

    def box(
        self, x: int, y: int, w: int, h: int, words: str, fill: str = PALE, ink: str = INK, *, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="{INK}"{dash}/>')
        lines = words.split("\n")
        for i, line in enumerate(lines):
            self.text(x + w // 2, y + h // 2 + 5 + 18 * i - 9 * (len(lines) - 1), line, ink=ink)

    def text(
        self, x: int, y: int, words: str, *, ink: str = INK, anchor: str = "middle", size: int = 14, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        style = f'fill="{ink}" font-size="{size}" text-anchor="{anchor}"{weight}'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')

    def arrow(self, *points: tuple[int, int], ink: str = INK, dashed: bool = False, head: bool = True) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        end = f' marker-end="url(#{ink[1:]})"' if head else ""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.8"{dash}{end}/>')

    def __str__(self) -> str:
        width, height = self.size
        heads = "".join(
            f'<marker id="{ink[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{ink}"/></marker>'
            for ink in (INK, GREY, TEAL, RED)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" font-family="DejaVu Sans, Verdana, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title><defs>{heads}</defs>",
                f'<rect width="{width}" height="{height}" fill="white"/>',
                *self.parts[1:],
                "</svg>",
                "",
            ]
        )


def parts() -> Drawing:
    d = Drawing(800, 300, "A host with two slots, a seed in the first one, and a controller that decides")
    d.box(20, 170, 90, 50, "input", "white")
    d.box(150, 170, 110, 50, "stage 1", DARK, "white")
    d.box(420, 170, 110, 50, "stage 2", DARK, "white")
    d.box(690, 170, 90, 50, "head", DARK, "white")
    d.arrow((110, 195), (150, 195))
    d.box(290, 180, 90, 30, "slot 0", "white", dashed=True)
    d.box(560, 180, 90, 30, "slot 1", "white", dashed=True)
    d.arrow((260, 195), (290, 195))
    d.arrow((380, 195), (420, 195))
    d.arrow((530, 195), (560, 195))
    d.arrow((650, 195), (690, 195))
    d.box(290, 110, 90, 40, "seed: conv", YELLOW)
    d.arrow((315, 180), (315, 152), ink=TEAL)
    d.arrow((355, 150), (355, 178), ink=TEAL)
    d.text(605, 164, "empty", ink=GREY)
    d.box(150, 20, 500, 44, "controller: once per epoch WAIT, GERMINATE, PRUNE or FOSSILIZE", BLUE)
    d.arrow((335, 64), (335, 108), dashed=True)
    d.arrow((605, 64), (605, 148), dashed=True)
    d.text(345, 92, "decides", ink=GREY, anchor="start")
    d.arrow((205, 170), (205, 66), ink=GREY, dashed=True)
    d.text(197, 120, "measurements", ink=GREY, anchor="end")
    d.arrow((150, 238), (150, 246), (780, 246), (780, 238), ink=GREY, head=False)
    d.text(465, 268, "the host: your model. Its parameters, names and forward pass stay yours.", ink=GREY)
    return d


def stages() -> Drawing:
    d = Drawing(800, 290, "The stages of a seed, and who ends each")
    row = [
        ("DORMANT", "white", INK, "slot is empty"),
        ("GERMINATED", PALE, INK, "planted"),
        ("TRAINING", YELLOW, INK, "learns in a\nshadow pass"),
        ("BLENDING", BLUE, INK, "alpha goes\n0 → 1"),
        ("HOLDING", TEAL, "white", "acts fully,\non trial"),
        ("FOSSILIZED", DARK, "white", "permanent"),
    ]
    for i, (name, fill, ink, words) in enumerate(row):
        x = 14 + 130 * i
        d.box(x, 60, 112, 42, name, fill, ink)
        for j, line in enumerate(words.split("\n")):
            d.text(x + 56, 124 + 17 * j, line, ink=GREY, size=13)
        if i:
            d.arrow((x - 18, 81), (x, 81))
    for x, words in ((135, "controller"), (265, "epoch"), (395, "gate"), (525, "gate"), (655, "controller")):
        d.text(x, 48, words, size=12, ink=TEAL)
    d.arrow((200, 160), (200, 176), (588, 176), (588, 160), ink=RED, head=False)
    d.arrow((330, 160), (330, 176), ink=RED, head=False)
    d.arrow((460, 160), (460, 176), ink=RED, head=False)
    d.arrow((394, 176), (394, 206), ink=RED)
    d.text(404, 196, "PRUNE, by the controller", ink=RED, anchor="start", size=13)
    for x, name in ((338, "PRUNED"), (208, "EMBARGOED"), (78, "RESETTING")):
        d.box(x, 208, 112, 38, name, PALE)
    d.arrow((338, 227), (320, 227))
    d.arrow((208, 227), (190, 227))
    d.arrow((78, 227), (54, 227), (54, 150))
    d.text(235, 270, "rest of the slot, by time", ink=GREY, size=13)
    d.text(14, 24, "The host alone produces the output", anchor="start", size=13, bold=True)
    d.text(404, 24, "The seed takes part in the output", anchor="start", size=13, bold=True)
    d.arrow((395, 10), (395, 30), ink=GREY, dashed=True, head=False)
    return d


def shadow() -> Drawing:
    d = Drawing(800, 330, "The ordinary pass and the shadow pass of one minibatch")
    d.text(20, 28, "Ordinary pass: the host learns, as if there were no seed", anchor="start", bold=True)
    for x, name in ((130, "stage 1"), (420, "stage 2"), (560, "head")):
        d.box(x, 44, 100, 44, name, DARK, "white")
    d.box(20, 44, 80, 44, "input", "white")
    d.arrow((100, 66), (130, 66))
    d.arrow((230, 66), (420, 66))
    d.arrow((520, 66), (560, 66))
    d.arrow((660, 66), (700, 66))
    d.box(700, 44, 80, 44, "loss", "white")
    d.arrow((740, 88), (740, 112), (180, 112), (180, 90), ink=RED, dashed=True)
    d.text(470, 130, "gradient reaches the host", ink=RED, size=13)
    d.text(20, 226, "Shadow pass: the seed learns,", anchor="start", bold=True)
    d.text(20, 246, "the host is a constant", anchor="start", bold=True)
    d.arrow((325, 66), (325, 212), ink=GREY, dashed=True)
    d.text(318, 158, "detached copy", ink=GREY, size=13, anchor="end")
    d.box(275, 214, 100, 44, "seed", YELLOW)
    for x, name in ((420, "stage 2"), (560, "head")):
        d.box(x, 214, 100, 44, name, "white", GREY, dashed=True)
    d.arrow((375, 236), (420, 236))
    d.arrow((520, 236), (560, 236))
    d.arrow((660, 236), (700, 236))
    d.box(700, 214, 80, 44, "loss", "white")
    d.arrow((740, 258), (740, 284), (325, 284), (325, 260), ink=RED, dashed=True)
    d.text(530, 302, "gradient reaches the seed only", ink=RED, size=13)
    d.text(20, 322, "Shadow benefit = accuracy of the lower pass − accuracy of the upper pass", anchor="start", size=13)
    return d


def value() -> Drawing:
    d = Drawing(800, 300, "Contribution of a seed against its rent")
    d.text(20, 28, "Contribution: the same validation examples, with and without the seed", anchor="start", bold=True)
    d.box(20, 44, 330, 40, "network as it is: 92.4 %", DARK, "white")
    d.box(20, 96, 270, 40, "the same, seed removed: 84.1 %", "white", dashed=True)
    d.arrow((290, 146), (350, 146), ink=TEAL)
    d.arrow((290, 138), (290, 154), ink=TEAL, head=False)
    d.text(320, 170, "contribution: 8.3 points", ink=TEAL)
    d.text(430, 64, "paired per example, with a standard error;", anchor="start", ink=GREY, size=13)
    d.text(430, 84, "the host is re-run from the slot on", anchor="start", ink=GREY, size=13)
    d.text(20, 212, "Rent: what the extra parameters must earn", anchor="start", bold=True)
    d.box(20, 226, 200, 36, "host: 1,000 parameters", PALE)
    d.box(220, 226, 100, 36, "seed: 500", YELLOW)
    d.text(350, 249, "rent = 5 points × 500 / 1,000 = 2.5 points", anchor="start")
    d.text(20, 286, "The seed pays: 8.3 > 2.5.   Score of the network = 92.4 − 2.5 = 89.9", anchor="start", size=14)
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "concept_parts.svg": parts,
    "concept_stages.svg": stages,
    "concept_shadow.svg": shadow,
    "concept_value.svg": value,
}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(str(draw()), "utf-8")

"""Draw docs/assets/demo-loss.svg from a demo run: `python docs/loss_curve.py demo/model/trainer_state.json`."""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 56, 24, 44, 44
COLOURS = {"loss": "#3f51b5", "eval_loss": "#e65100"}
NAMES = {"loss": "training", "eval_loss": "validation"}


def svg(history: list[dict], caption: str) -> str:
    """The losses of `log_history` in nats per token over optimizer steps."""
    curves = {key: [(row["step"], row[key]) for row in history if key in row] for key in COLOURS}
    points = [point for curve in curves.values() for point in curve]
    last = max(step for step, _ in points)
    low, high = math.floor(min(y for _, y in points)), math.ceil(max(y for _, y in points))

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{caption}</text>',
    ]
    for loss in range(low, high + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, last + 1, last // 4):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer steps</text>')
    parts.append(f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})">loss</text>')
    for row, (key, curve) in enumerate(curves.items()):
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[key]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{COLOURS[key]}"/>' for s, v in curve]
        parts.append(f'<text x="{WIDTH - 110}" y="{TOP + 24 + 18 * row}" fill="{COLOURS[key]}">{NAMES[key]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    state = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    caption = "make demo: 2.9M parameters, text of the Python distribution, 2 CPU cores"
    out = Path(__file__).resolve().parent / "assets" / "demo-loss.svg"
    out.parent.mkdir(exist_ok=True)
    out.write_text(svg(state["log_history"], caption), encoding="utf-8")

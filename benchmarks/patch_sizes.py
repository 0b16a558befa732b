"""What smaller patches buy, and what they cost: labels of CIFAR-10 and masks of the pets, patches of 2, 4, 8 and 16.

    python benchmarks/patch_sizes.py --data data --out runs/patches
    python benchmarks/patch_sizes.py --out runs/patches --plot docs/patch-sizes.png

One small model, the same number of pictures for every side of patches; nothing but that side differs. `--data` as in
images_training.py. The second command draws what the first one measured.
"""

import argparse
import json
from pathlib import Path

from images_training import one_run
from training_runs import read_run

SIDES = (2, 4, 8, 16)
MODEL = "model.width=192 model.heads=6 model.layers=6 model.feedforward=768 model.patches=linear model.drop_path=0"
MODEL += " compile=false warmup=100 ema=0.99 validate_every=100000"
RUNS = {
    "classify": f"cifar10 cifar10 {MODEL} steps=1500 batch_images=512"
    " augment.random_ops=0 augment.mixup=0 augment.cutmix=0",
    "segment": f"pets-segment pets-segment {MODEL} steps=800 batch_images=64 model.segmenter=linear augment.cutmix=0",
}
QUALITY = {"classify": ("accuracy", "% of the labels right"), "segment": ("mean_iou", "mean IoU of the masks, %")}


def measure(data: Path, out: Path, tasks: list[str], sides: list[int]) -> None:
    print("| task | patch | tokens | pictures/s | seconds | quality |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    with (out / "patches.jsonl").open("w") as file:
        for task in tasks:
            for side in sides:
                result = one_run(read_run(f"{RUNS[task]} model.patch={side}"), data, out / f"{task}-{side}")
                tokens = ({"classify": 32, "segment": 80}[task] // side) ** 2
                row = {"task": task, "patch": side, "tokens": tokens, "quality": result[QUALITY[task][0]]}
                row |= {"seconds": result["seconds"], "pictures_per_second": result["pictures_per_second"]}
                file.write(json.dumps(row) + "\n")
                figures = f"{row['pictures_per_second']:,} | {row['seconds']:.0f} | {row['quality']:.1f}"
                print(f"| {task} | {side} | {tokens} | {figures} |", flush=True)


def plot(out: Path, picture: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    rows = [json.loads(line) for line in (out / "patches.jsonl").read_text().splitlines()]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes[0], tasks):
        label, mine = QUALITY[task][1], [row for row in rows if row["task"] == task]
        speeds, qualities = [row["pictures_per_second"] for row in mine], [row["quality"] for row in mine]
        ax.plot(speeds, qualities, marker="o", color="#0072b2")
        for row, x, y in zip(mine, speeds, qualities):
            # The curve falls at its end: the name stands beside it there, above it elsewhere.
            place = dict(xytext=(7, -3), ha="left") if row is mine[-1] else dict(xytext=(0, 7), ha="center")
            ax.annotate(f"{row['patch']}×{row['patch']}", (x, y), textcoords="offset points", **place)
        ax.set(xscale="log", xlabel="pictures a second, training", ylabel=label, title=task)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.minorticks_off()
        ax.tick_params(axis="x", rotation=30)
        ax.margins(x=0.25, y=0.15)
        ax.grid(alpha=0.3)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--sides", type=int, nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--plot", type=Path, help="draw what was measured, into this file")
    options = parser.parse_args()
    if options.plot:
        plot(options.out, options.plot)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options.data, options.out, options.tasks, options.sides)


if __name__ == "__main__":
    main()

"""Quality and cost of patch sizes 2, 4, 8 and 16: labels of CIFAR-10 and masks of the pets.

    python benchmarks/patch_sizes.py --data data --out runs/patches
    python benchmarks/patch_sizes.py --out runs/patches --plot docs/patch-sizes.png

One small model, trained on the same number of images for every patch size; only the patch size differs. `--data` as in
images_training.py. The second command plots the results of the first.
"""

import argparse
import json
from pathlib import Path

from images_training import train_and_score
from training_runs import read_run

PATCH_SIZES = (2, 4, 8, 16)
MODEL = "model.width=192 model.heads=6 model.layers=6 model.feedforward=768 model.patches=linear model.drop_path=0"
MODEL += " compile=false warmup=100 ema=0.99 validate_every=100000"
RUNS = {
    "classify": f"cifar10 cifar10 {MODEL} steps=1500 batch_images=512"
    " augment.random_ops=0 augment.mixup=0 augment.cutmix=0",
    "segment": f"pets-segment pets-segment {MODEL} steps=800 batch_images=64 model.segmenter=linear augment.cutmix=0",
}
QUALITY = {"classify": ("accuracy", "accuracy, %"), "segment": ("mean_iou", "mean IoU of the masks, %")}


def measure(data: Path, out: Path, tasks: list[str], patch_sizes: list[int]) -> None:
    print("| task | patch | tokens | images/s | seconds | quality |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    with (out / "patches.jsonl").open("w") as file:
        for task in tasks:
            for patch in patch_sizes:
                result = train_and_score(read_run(f"{RUNS[task]} model.patch={patch}"), data, out / f"{task}-{patch}")
                tokens = ({"classify": 32, "segment": 80}[task] // patch) ** 2
                row = {"task": task, "patch": patch, "tokens": tokens, "quality": result[QUALITY[task][0]]}
                row |= {"seconds": result["seconds"], "images_per_second": result["images_per_second"]}
                file.write(json.dumps(row) + "\n")
                values = f"{row['images_per_second']:,} | {row['seconds']:.0f} | {row['quality']:.1f}"
                print(f"| {task} | {patch} | {tokens} | {values} |", flush=True)


def plot(out: Path, file: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    rows = [json.loads(line) for line in (out / "patches.jsonl").read_text().splitlines()]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes[0], tasks):
        label, task_rows = QUALITY[task][1], [row for row in rows if row["task"] == task]
        speeds, qualities = [row["images_per_second"] for row in task_rows], [row["quality"] for row in task_rows]
        ax.plot(speeds, qualities, marker="o", color="#0072b2")
        for row, x, y in zip(task_rows, speeds, qualities):
            # The curve falls at its end: the label is to the right of the last point, above the others.
            position = dict(xytext=(7, -3), ha="left") if row is task_rows[-1] else dict(xytext=(0, 7), ha="center")
            ax.annotate(f"{row['patch']}×{row['patch']}", (x, y), textcoords="offset points", **position)
        ax.set(xscale="log", xlabel="images per second, training", ylabel=label, title=task)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.minorticks_off()
        ax.tick_params(axis="x", rotation=30)
        ax.margins(x=0.25, y=0.15)
        ax.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--sides", type=int, nargs="+", choices=PATCH_SIZES, default=list(PATCH_SIZES))
    parser.add_argument("--plot", type=Path, help="plot the results to this file")
    options = parser.parse_args()
    if options.plot:
        plot(options.out, options.plot)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options.data, options.out, options.tasks, options.sides)


if __name__ == "__main__":
    main()

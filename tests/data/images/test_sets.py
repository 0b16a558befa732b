import gzip
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.data import read_images, read_ragged_images
from regard.data.batching.batch import IGNORE_INDEX
from regard.errors import RegardError
from tests.data.helpers import write
from tests.data.image_helpers import SIDE, make_images, to_pillow, write_class_folders, write_idx, write_image_table

PIXELS = make_images()
LABELS = ["b", "a", "c", "a", "b", "b", "c"]
NUMBERS = np.array([1, 0, 2, 0, 1, 1, 2])
MASKS = np.random.default_rng(1).integers(0, 4, (7, SIDE, SIDE), np.uint8)


def check(images, pixels=PIXELS, numbers=NUMBERS, names=("a", "b", "c"), masks=None):
    assert images.pixels.dtype == np.uint8
    assert images.pixels.shape == pixels.shape
    assert (images.pixels == pixels).all()
    assert images.labels.tolist() == list(numbers)
    assert images.names == names
    assert images.skipped == ()
    if masks is None:
        assert images.masks is None
    else:
        assert (images.masks == masks).all()
        assert images.mask_values == tuple(np.unique(masks))
    values = pixels.reshape(-1, pixels.shape[-1]) / 255
    assert np.allclose(images.mean, values.mean(0))
    assert np.allclose(images.std, values.std(0))


def test_one_folder_per_class(folder):
    write_class_folders("photos", PIXELS, LABELS)
    order = np.argsort(NUMBERS, kind="stable")
    check(read_images(["photos"]), PIXELS[order], NUMBERS[order])
    check(read_images([folder / "photos"]), PIXELS[order], NUMBERS[order])


def test_files_that_are_not_images_are_left_out(folder):
    write_class_folders("photos", PIXELS, LABELS)
    for name in (".hidden.png", "a/.hidden.png", "a/._01.png", "readme.txt", "a/Thumbs.db", "__MACOSX/x/1.png"):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        write(f"photos/{name}", "nonsense")
    Path("photos/.cache").mkdir()
    Path("photos/a/deeper.png").mkdir()  # a folder despite its suffix
    assert len(read_images(["photos"])) == 7


def test_links_are_followed(folder):
    write_class_folders("photos", PIXELS, LABELS)
    os.rename("photos/c", "elsewhere")
    os.symlink("../elsewhere", "photos/c")
    os.symlink("01.png", "photos/a/09.PNG")
    os.symlink("..", "photos/a/loop")
    images = read_images(["photos"])
    assert images.names == ("a", "b", "c")
    assert len(images) == 8
    os.symlink("nowhere.png", "photos/b/00x.png")
    with pytest.raises(RegardError, match=r"^photos/b/00x\.png: there is no such file\. Fix the path or the link"):
        read_images(["photos"])
    assert len(read_images(["photos"], on_bad="skip")) == 8


def test_folder_of_images_without_labels(folder):
    for i in (3, 1, 2):
        to_pillow(PIXELS[i]).save(f"{i}.png")
    check(read_images([folder]), PIXELS[1:4], [IGNORE_INDEX] * 3, ())
    check(read_images(["2.png", "1.png"]), PIXELS[[2, 1]], [IGNORE_INDEX] * 2, ())


def test_sub_folders_of_a_class_folder_belong_to_the_class(folder):
    """As in torchvision's ImageFolder; a link to a folder above is no sub-folder."""
    write_class_folders("data", PIXELS[:4], ["a", "b", "a/x", "a/x/y"])
    os.symlink(Path("data/a").resolve(), "data/a/x/again")
    images = read_images(["data"])
    assert images.names == ("a", "b")
    assert images.labels.tolist() == [0, 0, 0, 1]
    write_class_folders("masked", PIXELS[:1], ["images/x"])
    write_class_folders("masked", PIXELS[:1, ..., :1], ["masks/x"])
    assert len(read_images(["masked"])) == 1


def test_folder_of_images_and_masks(folder):
    for kind, arrays in (("images", PIXELS), ("masks", MASKS)):
        Path("data", kind).mkdir(parents=True)
        for i, one in enumerate(arrays):
            Image.fromarray(one).save(f"data/{kind}/{i}.{'bmp' if kind == 'images' else 'png'}")
    check(read_images(["data"]), PIXELS, [IGNORE_INDEX] * 7, (), MASKS)
    os.remove("data/masks/3.png")
    with pytest.raises(RegardError, match=r"^data/images/3\.bmp has no mask in data/masks\. Add the mask as 3\.png\."):
        read_images(["data"])


@pytest.mark.parametrize("name", ["index.csv", "index.tsv", "index.csv.gz", "deep/index.csv"])
def test_table_of_files(folder, name):
    Path("deep").mkdir()
    check(read_images([write_image_table(name, PIXELS, LABELS, MASKS)]), masks=MASKS)


def test_tables_with_other_column_names(folder):
    write_image_table("index.csv", PIXELS, LABELS)
    text = Path("index.csv").read_text()
    for header in ("file,label", "Filename,Label ", "image,label"):
        write("other.csv", "\ufeff" + text.replace("path,label", header).replace("\n", "\r\n") + "\r\n")
        check(read_images(["other.csv"]))
    write("quoted.csv", 'more,label,path\n"a, b\n",b,"index-0.png"\n,a,index-1.png\n')
    check(read_images(["quoted.csv"]), PIXELS[:2], [1, 0], ("a", "b"))
    write("none.csv", text.replace(",label", ",other"))
    check(read_images(["none.csv"]), PIXELS, [IGNORE_INDEX] * 7, ())
    check(read_images(["none.csv"], label="other"))
    check(read_images(["none.csv"], label="Other"))


def test_parts_of_a_table(folder):
    write_image_table("index.csv", PIXELS, LABELS, splits=["train", "test", "train", "test", "train", "train", "train"])
    check(read_images(["index.csv"]))
    check(read_images(["index.csv:test"]), PIXELS[[1, 3]], [0, 0], ("a",))
    train = [0, 2, 4, 5, 6]
    check(read_images(["index.csv:train"]), PIXELS[train], [0, 1, 0, 0, 1], ("b", "c"))
    check(read_images(["index.csv:test", "index.csv:train"]), PIXELS[[1, 3, *train]], NUMBERS[[1, 3, *train]])
    os.rename("index.csv", "index.csv:test")  # a file with that full name
    os.link("index.csv:test", "a:b.csv")
    check(read_images(["a:b.csv"]))


def test_limit_reads_the_first_images(folder):
    name = write_image_table("index.csv", PIXELS, LABELS)
    np.savez("a.npz", images=PIXELS, labels=np.array(LABELS))
    check(read_images([name], limit=2), PIXELS[:2], [1, 0], ("a", "b"))
    check(read_images([name, "a.npz"], limit=9, cache="cache"), PIXELS[[*range(7), 0, 1]], NUMBERS[[*range(7), 0, 1]])
    check(read_images([name, "a.npz"], limit=2, cache="cache"), PIXELS[:2], [1, 0], ("a", "b"))
    assert len(read_ragged_images(["a.npz"], patch=2, limit=3)) == 3


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (dict(images=PIXELS, labels=NUMBERS, names=np.array(["a", "b", "c"]), masks=MASKS), {}),
        (dict(x=PIXELS, y=np.array(LABELS)[:, None], masks=MASKS.astype(np.int64)), {}),
        (dict(images=PIXELS, labels=NUMBERS, kind=np.array(LABELS), masks=MASKS), {"label": "kind"}),
        (dict(x=PIXELS, kind=NUMBERS + 1, kind_names=np.array(["", *"abc"]), masks=MASKS), {"label": "kind"}),
        (dict(images=PIXELS / 255, labels=np.array(LABELS), masks=MASKS), {}),
    ],
)
def test_npz(folder, arrays, options):
    np.savez_compressed("a.npz", **arrays)
    check(read_images(["a.npz"], **options), masks=MASKS)


def test_parts_of_npz(folder):
    np.savez("a.npz", x_train=PIXELS[:5], y_train=NUMBERS[:5], x_test=PIXELS[5:], y_test=NUMBERS[5:])
    np.savez("b.npz", names=np.array(["a", "b", "c"]), train_images=PIXELS[:5], train_labels=NUMBERS[:5])
    check(read_images(["a.npz:train"]), PIXELS[:5], NUMBERS[:5], ("0", "1", "2"))
    check(read_images(["a.npz:test"]), PIXELS[5:], [0, 1], ("1", "2"))
    check(read_images(["b.npz:train"]), PIXELS[:5], NUMBERS[:5])


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_idx(folder, packing):
    gray = make_images(gray=True)
    images = write_idx("train-images-idx3-ubyte" + packing, gray[..., 0])
    check(read_images([images]), gray, [IGNORE_INDEX] * 7, ())
    labels = write_idx("labels" + packing, NUMBERS.astype(np.uint8))
    check(read_images([images, labels]), gray, NUMBERS, ("0", "1", "2"))
    twice = np.tile(gray, (2, 1, 1, 1))
    check(read_images([images, labels, images, labels]), twice, [*NUMBERS, *NUMBERS], ("0", "1", "2"))
    os.rename(labels, "train-labels-idx1-ubyte" + packing)
    check(read_images([images]), gray, NUMBERS, ("0", "1", "2"))
    assert read_images([images], channels=3).pixels.tolist() == gray.repeat(3, -1).tolist()
    check(read_images([write_idx("color.idx", PIXELS)]), PIXELS, [IGNORE_INDEX] * 7, ())


def test_integer_labels_are_sorted_by_value(folder):
    labels = ["10", "2", "x", "1", "2", "10", "a"]
    images = read_images([write_image_table("index.csv", PIXELS, labels)])
    assert images.names == ("1", "2", "10", "a", "x")
    assert [images.names[i] for i in images.labels] == labels


def test_label_ids_of_a_model(folder):
    images = read_images([write_image_table("index.csv", PIXELS, LABELS)])
    other = images.with_names(("c", "x", "b", "a"))
    assert other.labels.tolist() == [2, 3, 0, 3, 2, 2, 0]
    assert other.names == ("c", "x", "b", "a")
    with pytest.raises(RegardError, match=r"^Some images have the label 'c', which .* Its labels are a, b\."):
        images.with_names(("a", "b"))
    unlabeled = read_images(["index-0.png"]).with_names(("a", "b"))
    assert unlabeled.labels.tolist() == [IGNORE_INDEX]


def test_images_of_different_sizes_need_a_size(folder):
    for i, size in enumerate([(8, 6), (8, 6), (12, 16)]):
        Image.new("L", size, 50 * i).save(f"{i}.png")
    assert read_images(["0.png", "1.png"]).pixels.shape == (2, 6, 8, 1)
    with pytest.raises(RegardError) as caught:
        read_images(["0.png", "1.png", "2.png"])
    assert str(caught.value) == (
        "Images differ in size: 1.png has 8 x 6 pixels, 2.png 12 x 16. "
        "Set the size that all images are resized to (data.size)."
    )
    images = read_images(["0.png", "1.png", "2.png"], size=5)
    assert images.pixels.shape == (3, 5, 5, 1)
    assert (images.pixels == np.array([0, 50, 100])[:, None, None, None]).all()
    assert read_images(["0.png", "2.png"], size=(4, 7), channels=3).pixels.shape == (2, 4, 7, 3)


def test_channels_are_the_maximum_over_the_images(folder):
    Image.new("L", (4, 4), 9).save("gray.png")
    Image.new("RGB", (4, 4), (9, 8, 7)).save("color.png")
    assert read_images(["gray.png"]).pixels.shape[-1] == 1
    both = read_images(["gray.png", "color.png"]).pixels
    assert both[:, 0, 0].tolist() == [[9, 9, 9], [9, 8, 7]]
    assert read_images(["gray.png", "color.png"], channels=1).pixels[:, 0, 0].tolist() == [[9], [8]]


def test_bad_images_are_skipped_and_counted(folder, caplog):
    write_class_folders("photos", PIXELS, LABELS)
    write("photos/a/00.png", "nonsense")
    content = Path("photos/b/00.png").read_bytes()
    write("photos/b/000.png", content[: len(content) // 2])
    with pytest.raises(RegardError, match=r"^photos/a/00\.png: not a readable image"):
        read_images(["photos"])
    for options in ({}, {"size": 4, "channels": 3}):
        images = read_images(["photos"], on_bad="skip", **options)
        assert len(images) == 7
        assert [one.split(":")[0] for one in images.skipped] == ["photos/a/00.png", "photos/b/000.png"]
        assert "2 files were skipped; the first: photos/a/00.png: not a readable image" in caplog.text
        caplog.clear()
    with pytest.raises(RegardError, match=r"^None of the images can be read; the first error: photos/b/000\.png"):
        read_images(["photos/b/000.png", "photos/a/00.png"], on_bad="skip")


def test_order_and_progress_of_many_images(folder):
    many = make_images(count=300)
    progress = []
    write_image_table("index.csv", many, [str(i) for i in range(300)])
    images = read_images(["index.csv"], progress=lambda done, total: progress.append((done, total)))
    check(images, many, range(300), tuple(map(str, range(300))))
    assert progress == [(i + 1, 300) for i in range(300)]


def test_ragged_images(folder):
    sizes = [(20, 31), (16, 8), (3, 50)]
    for i, (height, width) in enumerate(sizes):
        Image.new("RGB", (width, height), (i, 10, 20)).save(f"{i}.png")
        Image.new("L", (width, height), i).save(f"{i}-mask.png")
    write("index.csv", "path,label,mask\n" + "".join(f"{i}.png,{i},{i}-mask.png\n" for i in range(3)))
    images = read_ragged_images(["index.csv"], patch=8)
    assert images.sizes.tolist() == [[16, 32], [16, 8], [8, 48]]
    assert len(images) == 3
    assert images.labels.tolist() == [0, 1, 2]
    for i, one in enumerate(images.to_tensors([0, 1, 2])):
        assert one.shape == (3, *images.sizes[i])
        assert one.dtype == torch.float32
        assert torch.allclose(one, torch.tensor([i, 10, 20])[:, None, None] / 255)
        assert images.pixels(i).shape == (*images.sizes[i], 3)
        assert (images.mask(i) == i).all()
        assert images.mask(i).shape == tuple(images.sizes[i])
    small = read_ragged_images(["index.csv"], patch=8, longest=24, cache="cache")
    assert small.sizes.tolist() == [[16, 24], [16, 8], [8, 24]]
    with pytest.raises(
        RegardError, match=r"The patch size \(8\) must be at least 1 and at most the maximum side \(4\)"
    ):
        read_ragged_images(["index.csv"], patch=8, longest=4)


def write_any(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        np.savez(name, **content)
    elif isinstance(content, np.ndarray):
        write_idx(name, content)
    else:
        write(name, content)


@pytest.mark.parametrize(
    ("name", "content", "read", "message"),
    [
        ("x", b"", "nothing", r"^nothing: no such file or folder\. Fix"),
        ("x", b"", "nothing:train", r"^nothing:train: no such file or folder\."),
        ("x", b"abc", "x", r"^x: unsupported kind of image file\. Pass a folder, a table"),
        ("x/readme.txt", b"", "x", r"^x: no images found\. Pass a folder with"),
        (
            "x/cat/readme.txt",
            b"",
            "x",
            r"^x/cat: the class folder contains no images\. Add images or remove it",
        ),
        (
            "x/train/cat/1.png",
            b"",
            "x",
            r"^x/train: the class folder contains only folders, such as cat\. Pass the folder that",
        ),
        ("x/1.png", b"", "x:part", r"^x has no part 'part'\. Only tables"),
        ("a.csv", "", "a.csv", r"^a\.csv is empty\."),
        ("a.csv", "path,label\n", "a.csv", r"^a\.csv lists no images\. Write one row"),
        ("a.csv", "label,tile\na,1\n", "a.csv", r"^a\.csv has no column 'path'\. Its columns are label, tile\."),
        ("a.csv", "path,label\na.png\n", "a.csv", r"^a\.csv, line 2: expected 2 columns as in the header, got 1\."),
        ("a.csv", "path,label\n\na.png,\n", "a.csv", r"^a\.csv, line 3: the label is empty\. Fill"),
        ("a.csv", "path,mask\na.png,\n", "a.csv", r"^a\.csv, line 2: the mask is empty\."),
        (
            "a.csv",
            "path,split\na.png,x\nb.png,y\n",
            "a.csv:z",
            r"^a\.csv: no row has the split 'z'\. Its splits are x, y\.",
        ),
        ("a.csv", "path\na.png\n", "a.csv:z", r"^a\.csv has no column 'split'\."),
        ("a.csv", "path\na.png\n", "a.csv", r"^a\.png: there is no such file\."),
        ("a.csv", "path\n" + "x" * 200_000 + "\n", "a.csv", r"^a\.csv, line 2: not CSV \(field larger"),
        ("a.npz", b"nonsense", "a.npz", r"^a\.npz: not a readable \.npz file"),
        ("a.npz", dict(images=np.array([None])), "a.npz", r"^a\.npz: not a readable \.npz file \(Object arrays"),
        (
            "a.npz",
            dict(z=PIXELS),
            "a.npz",
            r"^a\.npz has no array images or x\. Its arrays are z\. To read .* a\.npz:train\.",
        ),
        ("a.npz", dict(x=PIXELS), "a.npz:t", r"^a\.npz has no array images or x of the part 't'\. Its arrays are x\.$"),
        ("a.npz", dict(x=PIXELS[0, 0]), "a.npz", r"^a\.npz: an array of shape 6 x 3 does not hold images\. The axes"),
        ("a.npz", dict(x=np.zeros((2, 3, 8, 8))), "a.npz", r"^a\.npz: an array of shape 2 x 3 x 8 x 8 does not hold"),
        ("a.npz", dict(x=PIXELS[:0]), "a.npz", r"^a\.npz: an array of shape 0 x 6 x 6 x 3 does not hold images"),
        (
            "a.npz",
            dict(x=PIXELS * 1.0),
            "a.npz",
            r"^a\.npz: unsupported images of float64 with values from 0\.0 to 255\.0",
        ),
        ("a.npz", dict(x=np.full((2, 3, 4), "a")), "a.npz", r"^a\.npz: unsupported images of <U1\. Store bytes"),
        ("a.npz", dict(x=PIXELS, y=NUMBERS, names=np.array("a")), "a.npz", r"^a\.npz: names has 0 axes\."),
        ("a.npz", dict(x=PIXELS, y=NUMBERS[:3]), "a.npz", r"^a\.npz: 3 labels of int64 for 7 images\."),
        ("a.npz", dict(x=PIXELS, y=NUMBERS * 1.5), "a.npz", r"^a\.npz: 7 labels of float64 for 7 images\."),
        ("a.npz", dict(x=PIXELS, y=NUMBERS, names=np.array(["a"])), "a.npz", r"labels from 0 to 2, but 1 names"),
        (
            "a.npz",
            dict(x=PIXELS, masks=MASKS[:, 1:]),
            "a.npz",
            r"^a\.npz: masks of shape 7 x 5 x 6 for images of shape 7 x 6 x 6",
        ),
        ("a.npz", dict(x=PIXELS, masks=MASKS * 1.0), "a.npz", r"^a\.npz: unsupported masks of float64\. Store classes"),
        ("idx", NUMBERS.astype(np.uint8), "idx", r"^idx: an array of shape 7 does not hold images"),
        (
            "idx",
            b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + b"1234567",
            "idx",
            r"^idx: its size does not match its header \(2 x 2 x 2 bytes",
        ),
        (
            "idx",
            b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + b"123456789",
            "idx",
            r"^idx: its size does not match its header \(2 x 2 x 2",
        ),
        ("idx", b"\0\0\x08\x03\0\0", "idx", r"^idx: (corrupt idx data|its size does not match)"),
        ("idx", b"\0\0\x0d\x03" + b"\0\0\0\x01" * 3 + b"1234", "idx", r"^idx: its values are not bytes\. Store"),
    ],
)
def test_invalid_files_are_errors(folder, name, content, read, message):
    write_any(name, content)
    with pytest.raises(RegardError, match=message):
        read_images([read])


def test_corrupt_gzip_is_an_error(folder):
    data = Path(write_idx("a.gz", PIXELS)).read_bytes()
    write("b", data[:-300])
    os.rename("b", "a.gz")
    with pytest.raises(RegardError, match=r"^a\.gz: corrupt idx data .* Download the file again"):
        read_images(["a.gz"])


def test_missing_label_array_or_column_is_an_error(folder):
    np.savez("a.npz", x=PIXELS, y=NUMBERS)
    with pytest.raises(RegardError, match=r"^a\.npz has no array breed\. Its arrays are x, y\."):
        read_images(["a.npz"], label="breed")
    write_image_table("a.csv", PIXELS, LABELS)
    with pytest.raises(RegardError, match=r"^a\.csv has no column 'breed'\. Its columns are path, label\."):
        read_images(["a.csv"], label="breed")


def test_inconsistent_images_are_errors(folder):
    write_class_folders("photos", PIXELS, LABELS)
    to_pillow(PIXELS[0]).save("alone.png")
    with pytest.raises(RegardError, match="Some images have labels and others do not"):
        read_images(["photos", "alone.png"])
    write("masks.csv", "path,mask\nalone.png,alone.png\n")
    Image.new("L", (SIDE, SIDE)).save("alone.png")
    with pytest.raises(RegardError, match="Some images have masks and others do not"):
        read_images(["alone.png", "masks.csv"])
    to_pillow(PIXELS[0]).save("photos/alone.png")
    with pytest.raises(RegardError, match=r"^photos/alone\.png is next to the class folders\. Move every"):
        read_images(["photos"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": -1}, "Invalid image size -1"),
        ({"size": (0, 4)}, r"Invalid image size \(0, 4\)"),
        ({"channels": 2}, r"channels must be 0, 1 or 3 \(got 2\)"),
        ({"on_bad": "ignore"}, "on_bad must be 'stop' or 'skip'"),
    ],
)
def test_invalid_options_are_errors(folder, options, message):
    to_pillow(PIXELS[0]).save("a.png")
    with pytest.raises(RegardError, match=message):
        read_images(["a.png"], **options)


@pytest.mark.parametrize(
    ("position", "value"),
    [(4, b"\xff"), (8, b"\x63"), (6, b"\x01")],
    ids=["version", "compression", "encryption"],
)
def test_unsupported_archive_is_an_error(folder, position, value):
    """zipfile raises NotImplementedError or RuntimeError for them."""
    np.savez("a.npz", x=PIXELS)
    content = bytearray(Path("a.npz").read_bytes())
    for signature, offset in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
        start = content.index(signature) + offset + position
        content[start : start + 1] = value
    Path("a.npz").write_bytes(content)
    with pytest.raises(RegardError, match=r"^a\.npz: not a readable \.npz file"):
        read_images(["a.npz"])


def test_archive_entry_that_is_not_an_array_is_an_error(folder):
    with zipfile.ZipFile("a.npz", "w") as archive:
        archive.writestr("images.npy", b"text")
    with pytest.raises(RegardError, match=r"^a\.npz: an array of shape  does not hold images"):
        read_images(["a.npz"])


def test_data_that_expands_too_far_is_an_error(folder):
    np.savez_compressed("a.npz", x=np.zeros((80, 1024, 1024), np.uint8))
    with pytest.raises(RegardError, match=r"^a\.npz: its arrays expand to 80 MiB, more than 100 times its size"):
        read_images(["a.npz"])
    header = b"\0\0\x08\x03" + struct.pack(">3I", 80, 1024, 1024)
    Path("b.gz").write_bytes(gzip.compress(header + bytes(80 << 20)))
    with pytest.raises(RegardError, match=r"bytes of gzip data expand to more than 64 MiB"):
        read_images(["b.gz"])


def test_size_in_a_header_is_not_trusted(folder):
    """Nothing of the stated size is allocated."""
    Path("a.idx").write_bytes(b"\0\0\x08\x03" + b"\0\0\xff\xff" * 3 + b"1")
    tracemalloc.start()
    with pytest.raises(RegardError, match="its size does not match its header"):
        read_images(["a.idx"])
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()

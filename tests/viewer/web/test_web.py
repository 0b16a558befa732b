"""The page's JavaScript module: bundling and, under node, agreement with NumPy."""

import base64
import json
import re
import subprocess
from typing import Any

import numpy as np
import pytest

from regard.errors import RegardError
from regard.viewer import web
from regard.viewer.page.text_scene import Scene, quantize_uint16
from tests.viewer import scenes
from tests.viewer.browser import node_program
from tests.viewer.helpers import weights
from tests.viewer.web.measures import agreement, mean_entropy

SOURCES = web.read_sources()


# Bundling


def test_the_module_contains_every_file_once_and_no_imports():
    page, whole = web.module(), web.module(with_engine=True)
    for text in (page, whole):
        assert len(re.findall("^export ", text, re.MULTILINE)) == text.count("export default { render };") == 1
        assert "import {" not in text
        assert not re.search(r"^\s|^//|^/\*.*\*/$", text, re.MULTILINE)
        assert "function openPage()" in text
    # The engine is in pages with a model only; every file follows the files that it imports.
    assert "onmessage" in whole
    assert "self.onmessage" not in page
    starts = {}
    for path, source in SOURCES.items():
        name = re.search(r"^(?:export )?((?:async )?(?:function|class|const) \w+)", source, re.MULTILINE)
        first = f"const {path.removesuffix('.css').upper()}_STYLE" if name is None else name[1]
        (found,) = re.finditer(rf"^{first}\b", whole, re.MULTILINE)
        starts[path] = found.start()
    for path, start in starts.items():
        assert all(starts[imported] < start for imported in web.imported_paths(path, SOURCES[path]))


def test_no_script_parses_text_as_markup_or_code():
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert sink not in web.module(with_engine=True)


def test_no_script_contains_addresses():
    addresses = {"http://www.w3.org/2000/svg"}  # an XML namespace, which is never fetched
    found = {part.split('"')[0] for part in (web.module(with_engine=True)).split("http")[1:]}
    assert {f"http{one}" for one in found} == addresses


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"index.js": 'import { a } from "./b.js";\n'}, "imports b.js, which is missing"),
        ({"index.js": 'import { a } from "./b.js";\n', "b.js": 'import { c } from "./index.js";\n'}, "Circular import"),
        (
            {"index.js": 'import { a } from "./b.js";\nconst a = 1;\n', "b.js": "export const a = 1;\n"},
            "a is defined in b.js",
        ),
    ],
)
def test_invalid_sources_raise_an_error(sources, message):
    with pytest.raises(RegardError, match=message):
        web.bundle(sources)


def test_file_imported_twice_is_bundled_once():
    sources = {
        "index.js": 'import { b } from "./b.js";\nimport { c } from "./c.js";\nexport default b + c;\n',
        "b.js": 'import { c } from "./c.js";\nexport const b = c;\n',
        "c.js": "export const c = 1;\n",
    }
    assert web.bundle(sources) == "const c = 1;\nconst b = c;\nexport default b + c;\n"


# Attention weights and measures


def node(imports: str, program: str, given: Any = None) -> Any:
    """Run a program under node with imports from the page's sources; return the JSON that it prints."""
    text = web.bundle(SOURCES | {"index.js": f"{imports}\nconst given = {json.dumps(given)};\n{program}\n"})
    command = [node_program(), "--input-type=module", "-"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


SHOW = "console.log(JSON.stringify({}));"
HEADS = (
    'import { computeWeights, extractHead, readBlob } from "./weights/maths.js";\n'
    'import { Kernel } from "./weights/kernel.js";\n'
    'import { AttentionMap, Attentions } from "./weights/maps.js";\nimport { Raster } from "./weights/raster.js";\n'
    'import { meanEntropy, meanOverlap } from "./weights/maths.js";'
)
OPEN = """
const blobs = given.blobs.map((text) => new Uint8Array(Buffer.from(text, "base64")).buffer);
const attentions = new Attentions({ scene: given.header, blob: async (n) => blobs[n], ownsAddress: false });
for (const one of given.header.attentions) await attentions.load(one.name);
"""


def carried(seen: Scene) -> dict[str, Any]:
    return {"header": seen.header, "blobs": [base64.b64encode(blob).decode() for blob in seen.blobs]}


def odd_scene(rng: np.random.Generator, *, exact: bool = True) -> Scene:
    """A scene with every kind of mask, a bias, grouped keys and concat, at lengths that are no multiple of a block."""
    T, S, H, D = 11, 13, 4, 10
    sides = [scenes.side("target", [f"t{i}" for i in range(T)]), scenes.side("source", [f"s{i}" for i in range(S)])]
    masks = {
        "free": None,
        "causal": {"op": "causal"},
        "window": {"op": "window", "size": 3},
        "local": {"op": "local", "size": 2},
        "lengths": {"op": "and", "parts": [{"op": "lengths", "length": 7}, {"op": "causal"}]},
        "holes": {"op": "and", "parts": [{"op": "causal"}, {"op": "not", "part": {"op": "window", "size": 2}}]},
        "either": {"op": "or", "parts": [{"op": "window", "size": 2}, {"op": "lengths", "length": 2}]},
        "nothing": {"op": "and", "parts": [{"op": "causal"}, {"op": "not", "part": {"op": "causal"}}]},
        "beyond": {"op": "and", "parts": [{"op": "window", "size": 1}, {"op": "lengths", "length": 5}]},
    }

    def numbers(*shape: int) -> np.ndarray:
        return rng.normal(0, 1.5, shape).astype(np.float32)

    axes = ("target", "source")
    attentions = [
        scenes.attention(name, "cross", 0, numbers(T, H, D), numbers(S, H, D), axes, mask)
        for name, mask in masks.items()
    ]
    attentions += [
        scenes.attention("bias", "cross", 0, numbers(T, H, D), numbers(S, 2, D), axes, None, numbers(H, T + S - 1)),
        scenes.attention("one key head", "cross", 0, numbers(T, H, D), numbers(S, 1, D), axes, masks["causal"]),
        scenes.attention("concat", "cross", 0, numbers(T, H, D), numbers(S, H, D), axes, None, None, numbers(H, D)),
        scenes.attention("far", "cross", 0, 60 * numbers(T, H, D), 60 * numbers(S, H, D), axes),
        scenes.attention(
            "far concat", "cross", 0, 99 * numbers(T, H, D), 99 * numbers(S, H, D), axes, None, None, numbers(H, D)
        ),
    ]
    capped = scenes.attention("capped", "cross", 0, numbers(T, H, D), numbers(S, H, D), axes, masks["window"])
    capped["score"]["cap"] = 0.5
    relative = scenes.attention("relative", "cross", 0, numbers(T, H, D), numbers(S, H, D), axes, masks["local"])
    relative["score"]["relative"] = [min(max(i // 3, 5), D - 1) for i in range(T + S - 1)]
    return scenes.scene(sides, [*attentions, capped, relative], ("s", "t"), exact=exact)


@pytest.fixture(params=["float32", "uint16"])
def odd(request) -> Scene:
    return odd_scene(np.random.default_rng(5), exact=request.param == "float32")


def test_weights_agree_with_the_numpy_reference(odd):
    """For every mask, bias and score, in double precision."""
    names = [one["name"] for one in odd.header["attentions"]]
    program = """
    const found = {};
    for (const { name, heads } of given.header.attentions) {
      found[name] = [];
      for (let head = 0; head < heads; head++) {
        const map = attentions.map({ attention: name, head }, false);
        for (let t = 0; t < map.rows; t++) found[name].push([...map.exactRow(t)]);
      }
    }"""
    found = node(HEADS, OPEN + program + SHOW.format("found"), carried(odd))
    for name in names:
        expected = weights(odd, name)
        # Quantized numbers are rounded to float32 when they are decoded.
        atol = 1e-4 if name.startswith("far") else 1e-6
        np.testing.assert_allclose(np.reshape(found[name], expected.shape), expected, atol=atol, err_msg=name)
    assert not np.any(found["nothing"])


def test_fast_kernel_agrees_with_the_plain_one(odd):
    """Full rows and parts of rows, before and after their sums are known, in any order."""
    program = """
    const [fast, plain] = [new Kernel(), new Kernel(false)];
    let worst = 0;
    for (const one of given.header.attentions) {
      const raw = {};
      for (const part of ["q", "k", "w", "bias"]) {
        raw[part] = one[part] ? readBlob(blobs[one[part].at], one[part]) : null;
      }
      for (let head = 0; head < one.heads; head++) {
        const made = extractHead(one, raw, head);
        const parts = [[[3, 1, 10, 0, 7, 2], 0, 13], [[1, 3], 4, 9], [[0, 5, 10], 12, 13], [[9], 0, 1]];
        for (const [rows, from, to] of parts) {
          const out = [fast, plain].map((kernel) => {
            const numbers = new Float32Array(rows.length * (to - from)).fill(7);
            kernel.computeRows(made, rows, from, to, numbers);
            return numbers;
          });
          out[0].forEach((weight, i) => (worst = Math.max(worst, Math.abs(weight - out[1][i]))));
        }
      }
    }
    console.log(JSON.stringify({ worst, fast: fast.run !== null, plain: plain.run === null }));"""
    found = node(HEADS, OPEN + program, carried(odd))
    assert found["fast"]
    assert found["plain"]
    assert found["worst"] < 2e-5


def test_kernel_recomputes_evicted_heads():
    """Many heads of different lengths exceed the kernel's memory."""
    program = """
    const kernel = new Kernel(true, 20000);
    const heads = [];
    for (let i = 0; i < 24; i++) {
      const [T, S, D] = [9, 90 + 31 * (i % 5), 16];
      const numbers = (n, seed) => Float32Array.from({ length: n }, (_, j) => ((seed + j * (j % 7)) % 13) / 6 - 1);
      const [q, k] = [numbers(T * D, i), numbers(S * D, 2 * i)];
      heads.push({ T, S, D, q, k, scale: 0.3, w: null, bias: null, mask: null });
    }
    let worst = 0;
    for (const head of [...heads, heads[0], heads[17], heads[0]]) {
      const out = new Float32Array(2 * head.S);
      kernel.computeRows(head, [1, 8], 0, head.S, out);
      const exact = computeWeights(head, 8, new Float64Array(head.S));
      for (let s = 0; s < head.S; s++) worst = Math.max(worst, Math.abs(exact[s] - out[head.S + s]));
    }
    console.log(JSON.stringify({ worst, generations: kernel.generation }));"""
    found = node(HEADS, program)
    assert found["worst"] < 1e-5
    assert found["generations"] > 1


LONG = 'if (given.long) Object.defineProperty(AttentionMap.prototype, "isMaterialized", { get: () => false });\n'


@pytest.mark.parametrize("long", [False, True])
def test_means_of_heads_and_merged_word_pieces(long):
    """Also for long texts, whose maps are computed row by row."""
    seen = scenes.small()
    program = """
    const rows = (map, list, from, to) => {
      const out = new Float32Array(list.length * (to - from));
      map.readRows(list, from, to, out);
      return [...out];
    };
    const found = {};
    const show = (map) => Array.from({ length: map.rows }, (_, t) => [...map.exactRow(t)]);
    found.mean = show(attentions.map({ attention: "decoder.1.cross", head: "mean" }, false));
    const words = attentions.map({ attention: "decoder.1.cross", head: 2 }, true);
    found.words = show(words);
    found.cells = rows(words, [...Array(words.rows).keys()], 0, words.columns);
    found.part = rows(words, [4, 2], 3, 7);
    found.labels = attentions.axesOf("decoder.1.cross", true).rows.labels;"""
    found = node(HEADS, LONG + OPEN + program + SHOW.format("found"), carried(seen) | {"long": long})
    expected = weights(seen, "decoder.1.cross")
    np.testing.assert_allclose(found["mean"], expected.mean(0), atol=1e-6)
    pieces = np.array([0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12])  # chas and sé are one word
    joined = np.stack([expected[2][pieces == word].mean(0) for word in range(13)])
    np.testing.assert_allclose(found["words"], joined, atol=1e-6)
    np.testing.assert_allclose(np.reshape(found["cells"], joined.shape), joined, atol=1e-5)
    np.testing.assert_allclose(np.reshape(found["part"], (2, 4)), joined[[4, 2], 3:7], atol=1e-5)
    assert found["labels"][4] == "chassé"


def test_columns_of_a_word_are_summed():
    words = [0, 1, 1, 1, 2, 3, 3, 4, 5]
    seen = scenes.translation(scenes.SOURCE, scenes.TARGET, source_words=words)
    program = "const map = attentions.map({ attention: 'decoder.0.cross', head: 1 }, true);"
    show = SHOW.format("Array.from({ length: map.rows }, (_, t) => [...map.exactRow(t)])")
    found = np.array(node(HEADS, OPEN + program + show, carried(seen)))
    expected = weights(seen, "decoder.0.cross")[1]
    columns = np.array([*words, 6])
    np.testing.assert_allclose(
        found, np.stack([expected[:, columns == word].sum(1) for word in range(7)], 1), atol=1e-6
    )
    np.testing.assert_allclose(found.sum(1), 1)


@pytest.mark.parametrize("long", [False, True])
def test_measures_agree_with_python(long):
    seen = odd_scene(np.random.default_rng(2))
    program = """
    const found = {};
    for (const { name } of given.header.attentions) {
      const maps = [0, 1].map((head) => attentions.map({ attention: name, head }, false));
      found[name] = [...maps.map(meanEntropy), meanOverlap(maps[0], maps[1])];
    }"""
    found = node(HEADS, LONG + OPEN + program + SHOW.format("found"), carried(seen) | {"long": long})
    for name, numbers in found.items():
        maps = weights(seen, name)[:2]
        expected = [*mean_entropy(maps), agreement(maps[0], maps[1])]
        np.testing.assert_allclose(numbers, expected, atol=1e-4, err_msg=name)


def test_raster_shows_the_maximum_of_each_block():
    """Values only grow, every block is covered early, and in the end each is the maximum of its cells."""
    seen = scenes.long(300, width=16)
    program = """
    const map = attentions.map({ attention: "blocks.0.attention", head: 0 }, false);
    Object.defineProperty(map, "isMaterialized", { value: false });
    const raster = new Raster(map, { rows: [37, 300], columns: [10, 211] }, 20, 30);
    const before = [];
    while (!raster.isCovered) { raster.step(7); }
    before.push(...raster.values);
    const early = raster.completedFraction;
    while (raster.step(7));
    const near = new Raster(map, { rows: [100, 140], columns: [90, 130] }, 40, 40, raster);
    const seeded = [...near.values];
    while (near.step(3));
    console.log(JSON.stringify({ before, early, share: raster.completedFraction,
      values: [...raster.values], block: raster.block,
      size: [raster.height, raster.width], near: [...near.values], seeded,
      greatest: map.argmaxIn([100, 140], [90, 130]) }));"""
    found = node(HEADS, OPEN + program, carried(seen))
    expected = weights(seen, "blocks.0.attention")[0]
    part = expected[37:300, 10:211]
    assert found["block"] == {"rows": 14, "columns": 7}
    assert found["size"] == [19, 29]
    blocks = np.array([[part[y : y + 14, x : x + 7].max() for x in range(0, 201, 7)] for y in range(0, 263, 14)])
    np.testing.assert_allclose(np.reshape(found["values"], (19, 29)), blocks, atol=1e-5)
    assert found["early"] < 0.12
    assert found["share"] == 1
    assert np.all(np.array(found["before"]) <= np.array(found["values"]) + 1e-7)
    np.testing.assert_allclose(np.reshape(found["near"], (40, 40)), expected[100:140, 90:130], atol=1e-5)
    # Before it is computed, a part shows the values of the surrounding raster.
    first = (100 - 37) // 14, (90 - 10) // 7
    assert found["seeded"][0] == pytest.approx(blocks[first], abs=1e-5)
    row, column = found["greatest"]
    assert expected[row, column] == pytest.approx(expected[100:140, 90:130].max(), abs=1e-6)


def test_quantized_numbers_are_decoded():
    x = np.random.default_rng(0).normal(3, 2, (6, 3, 5)).astype(np.float32)
    x[:, 1, 2] = -7.25  # a constant channel
    program = """
    const buffer = new Uint8Array(Buffer.from(given, "base64")).buffer;
    const raw = readBlob(buffer, { type: "uint16", shape: [6, 3, 5] });"""
    show = SHOW.format("[0, 1, 2].map((head) => [...decodeHead(raw, 6, 3, 5, head)])")
    given = base64.b64encode(quantize_uint16(x)).decode()
    found = node('import { readBlob, decodeHead } from "./weights/maths.js";', program + show, given)
    np.testing.assert_allclose(np.reshape(found, (3, 6, 5)).swapaxes(0, 1), x, atol=1e-4)
    assert np.all(np.reshape(found, (3, 6, 5))[1, :, 2] == -7.25)


def test_unknown_number_types_and_masks_raise_an_error():
    program = """
    const failures = [];
    const read = () => readBlob(new ArrayBuffer(4), { type: "float8", shape: [1] });
    for (const act of [read, () => mayAttend({ op: "moon" }, 0, 0)]) {
      try { act(); } catch (error) { failures.push(error.message); }
    }"""
    found = node('import { mayAttend, readBlob } from "./weights/maths.js";', program + SHOW.format("failures"))
    assert found == ["Unknown number type: float8.", "Unknown mask operation: moon."]


# Colors, addresses and tokens


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["blue", "iris"])
def test_lightness_of_colors_is_monotonic(name, dark):
    """Lightness alone shows the order of weights; text on every color has enough contrast."""
    program = """
    const colors = colorRamp(given.name, given.dark);
    const lights = Array.from({ length: 256 }, (_, i) => luminance(...colors.subarray(3 * i, 3 * i + 3)));
    const colormap = createColormap(given.name, "linear", given.dark);
    const light = lights.map((_, i) => colormap.needsLightText(i / 255));
    console.log(JSON.stringify({ lights, light }));"""
    imports = 'import { luminance, createColormap, colorRamp } from "./core/colors.js";'
    found = node(imports, program, {"name": name, "dark": dark})
    lights = np.array(found["lights"])
    steps = np.diff(lights[::8] ** (1 / 3))  # approximately perceptual lightness
    assert np.all(steps > 0.005) if dark else np.all(steps < -0.005)
    contrast = np.where(found["light"], 1.05 / (lights + 0.05), (lights + 0.05) / 0.05)
    assert contrast.min() > 4.5


def test_scales_map_ticks_to_the_unit_interval():
    program = """
    const scales = ["linear", "root", "log"];
    console.log(JSON.stringify(scales.map((scale) => [legendTicks(scale).map((tick) => scaleToUnit(scale, tick)),
      [0, 1, 2, NaN, -1].map((weight) => scaleToUnit(scale, weight))])));"""
    for ticks, ends in node('import { scaleToUnit, legendTicks } from "./core/colors.js";', program):
        assert ticks[0] == 0
        assert ticks[-1] == 1
        assert ticks == sorted(ticks)
        assert ends == [0, 1, 1, 0, 0]


def test_address_restores_the_view():
    view = {
        "view": "steps",
        "selected": {"attention": "decoder.1.cross", "head": 3},
        "other": {"attention": "a:b & c", "head": "mean"},
        "added": [{"attention": "encoder.0.attention", "head": 1}],
        "form": "lines",
        "words": True,
        "pin": [4, 17],
        "zoom": {"rows": [3, 9], "columns": [0, 40]},
        "scale": "log",
        "colors": "iris",
        "theme": "dark",
    }
    imports = 'import { readHash, writeHash } from "./core/state.js";'
    hash_, back = node(imports, SHOW.format("[writeHash(given), readHash('#' + writeHash(given))]"), view)
    assert back | view == back  # the address has further keys
    assert "#" not in hash_
    nothing = node(
        imports, SHOW.format("given.map(readHash)"), ["", "#%%%&at=&zoom=9-3-0-0&pin=-1,x&as=moon&theme=<b>"]
    )
    empty = dict.fromkeys(("other", "pin", "zoom", "scale"))
    for one in nothing:
        assert one == one | empty | {"view": "attention", "words": False, "colors": "blue", "theme": "auto"}


def test_invisible_characters_of_tokens_are_made_visible():
    tokens = ["the", " the", "", " ", "\n", "a\tb", "\u202ekcab", "\u200b", "\ud800", "<b>", "▁x", "\x07", "  "]
    found = node('import { makeVisible } from "./core/tokens.js";', SHOW.format("given.map(makeVisible)"), tokens)
    assert found == [
        *("the", "the", "∅", "␣", "⏎", "a⇥b", "U+202Ekcab", "U+200B", "U+D800", "<b>", "▁x", "U+0007", "␣␣"),
    ]


def test_alignment_error_rate_and_ranks():
    program = """
    const error = alignmentErrorRate([[0, 0], [1, 1]], [[0, 0], [1, 2]]);
    console.log(JSON.stringify([error, alignmentErrorRate([], []), topK([0.1, 0.5, 0.5, 0.2, 0.9], 3), argmax([1, 3, 2], 0, 2)]));"""  # noqa: E501
    imports = 'import { alignmentErrorRate, argmax, topK } from "./weights/maths.js";'
    assert node(imports, program) == [0.5, 0, [4, 1, 2], 1]


LABELS = [
    *(("previous", np.eye(8, k=-1)), ("next", np.eye(8, k=1)), ("same", np.eye(8))),
    *(("first", np.eye(8)[[0] * 8]), ("punctuation", np.eye(8)[[7] * 8]), ("diffuse", np.ones((8, 8)))),
    ("none", UNRELATED := np.eye(8)[[3, 5, 5, 6, 2, 2, 3, 4]]),
    # The best pattern has a share below one half.
    ("previous", 0.4 * np.eye(8, k=-1) + 0.6 * UNRELATED),
]


def test_heads_are_labeled_by_what_they_attend_to():
    rng = np.random.default_rng(1)
    tokens = ["a", "b", "c", "d", "e", "f", "g", "."]
    sides = [scenes.side(name, tokens) for name in ("source", "target", "predicted")]
    # q = log weights, k = unit vectors: softmax(q·k) are the weights.
    logits = np.stack([np.log(0.9 * one / one.sum(1, keepdims=True).clip(1e-9) + 0.1 / 8) for _, one in LABELS], 1)
    logits += rng.normal(0, 0.01, logits.shape)
    k = np.repeat(np.eye(8)[:, None], len(LABELS), 1)
    q = (logits * 8**0.5).astype(np.float32)
    seen = scenes.scene(
        sides,
        [
            scenes.attention("encoder.0.attention", "self", 0, q, k, ("source", "source")),
            scenes.attention("decoder.0.cross", "cross", 0, q[:, :3], k[:, :3], ("predicted", "source")),
        ],
        ("a b c", "a b c"),
    )
    program = """
    const label = (attention, head) => attentions.labelOf({ attention, head }).label;
    const found = given.header.attentions.map(({ name, heads }) =>
      Array.from({ length: heads }, (_, head) => label(name, head)));"""
    found = node(HEADS, OPEN + program + SHOW.format("found"), carried(seen))
    assert found == [[name for name, _ in LABELS], ["alignment"] * 3]


def test_numbers_are_written_without_hyphens_and_never_rounded_to_certainty():
    imports = (
        'import { formatProbability, formatWeight, tokenLabel } from "./core/tokens.js";\n'
        'import { formatScore } from "./views/search.js";\nimport { formatNumber } from "./trace/operations.js";\n'
        'import { temperedProbabilities } from "./views/output.js";'
    )
    program = """
    const next = { logprobs: given.logprobs, log_normalizers: given.normalizers, temperatures: [0.5, 1] };
    const entries = [["zebra", "<unk>"], ["ing", "##ing"]].flatMap((one) => [[...one, false], [...one, true]]);
    console.log(JSON.stringify([
      formatScore(Math.log(0.99998)), formatScore(0), formatWeight(1e-7), formatNumber(-2e-6), formatScore(-1.25),
      formatProbability(0.9999999), formatProbability(1), formatProbability(0.5), formatProbability(1e-7),
      entries.map((one) => tokenLabel(...one)), [0.5, 1].map((one) => temperedProbabilities(next, one)),
    ]));"""
    logits = np.array([1.0, 0.5, -1.0])
    logprobs = logits - np.log(np.exp(logits).sum())
    normalizers = [float(np.log(np.exp(logprobs / one).sum())) for one in (0.5, 1)]
    *texts, labels, shares = node(imports, program, {"logprobs": logprobs.tolist(), "normalizers": normalizers})
    assert texts == ["−2.0e−5", "0", "1.0000e−7", "−2.00e−6", "−1.25", "99.999%", "100%", "50.0%", "1e−5%"]
    assert labels == ["zebra <unk>", "<unk>", "ing", "##ing"]
    np.testing.assert_allclose(np.sum(shares, 1), 1)
    np.testing.assert_allclose(shares[0], np.exp(2 * logits) / np.exp(2 * logits).sum())

/** The output of the model, and a summary of what its attention shows. */

import { html, setAttributes, setChildren, tokenText, uniqueId } from "../core/dom.js";
import { formatProbability, isMaskToken, makeVisible, truncate, withMinus } from "../core/tokens.js";
import { isPunctuation, MIN_DIFFUSE } from "../weights/maps.js";
import { argmax, evenness, topK } from "../weights/maths.js";

/*
 * The first sentence of the page: what the model output, with its probability, and which tokens were attended to most.
 */

/** @typedef {import("../core/state.js").HeadRef} HeadRef */
/** @typedef {import("../weights/maps.js").Attentions} Attentions */

/** Number of tokens that the sentence names. */
const MAX_NAMED = 3;
const MAX_NAME_LENGTH = 24;
/** Weight from which a token is named, and its minimum ratio to uniform attention. */
const MIN_WEIGHT = 0.05;
const MIN_ABOVE = 1.25;

/** @param {any} axis @param {number} i */
const quoted = (axis, i) => html("q", {}, tokenText(truncate(axis.labels[i], MAX_NAME_LENGTH), axis.rtl));

/** Joins parts by commas and "and". @param {any[]} parts */
const enumerate = (parts) => parts.map((part, i) => [i === 0 ? "" : i === parts.length - 1 ? " and " : ", ", part]);

/** Whether a token of an axis is a word or part of one. @param {any} axis @param {number} i */
const isWord = (axis, i) => (axis.wordAt(i) ?? -1) >= 0 && !isPunctuation(axis.labels[i]);

/** A share as a whole percentage. @param {number} share */
const percent = (share) => (share > 0 && share < 0.005 ? "under 1%" : `${Math.round(100 * share)}%`);

/**
 * The clearest pairs of an output word and the word it attends to.
 * @param {import("../weights/maps.js").AttentionMap} map @param {any} rows @param {any} columns
 */
function clearestPairs(map, rows, columns) {
  const pairs = map.sampleRows().map((/** @type {number} */ row) => {
    const weights = map.exactRow(row);
    const column = argmax(weights);
    return { row, column, weight: weights[column] };
  });
  // Of words with about the same weight, long ones carry more of the meaning.
  const rank = (/** @type {{row: number, weight: number}} */ { row, weight }) =>
    Math.round(10 * weight) + Math.min(9, rows.labels[row].length) / 10;
  return pairs
    .filter(({ row, column, weight }) => isWord(rows, row) && isWord(columns, column) && weight >= MIN_WEIGHT)
    .sort((a, b) => rank(b) - rank(a))
    .slice(0, MAX_NAMED)
    .sort((a, b) => a.row - b.row);
}

/** What the model output, as the beginning of the sentence; null if there is nothing to say. @param {any} scene */
function outputClause({ output, similarity, image }) {
  const strong = (/** @type {string} */ text) => html("strong", {}, truncate(makeVisible(text), 60));
  const probability = (/** @type {number} */ share) => ` (${formatProbability(share)})`;
  if (image?.labels[0]?.probability !== undefined)
    return ["The model’s answer is ", strong(image.labels[0].name), probability(image.labels[0].probability)];
  if (typeof similarity === "number")
    return ["The two texts have a cosine similarity of ", strong(withMinus(similarity.toFixed(2)))];
  const best = (/** @type {any} */ step) => step.likeliest[0];
  switch (output?.kind) {
    case "translation":
      return output.logprob === null
        ? null
        : ["The model translates this with a probability of ", strong(formatProbability(Math.exp(output.logprob)))];
    case "continuation":
      return output.next_token
        ? [
            "The most likely next token is ",
            strong(output.next_token.tokens[0]),
            probability(
              Math.exp(
                output.next_token.logprobs[0] -
                  output.next_token.log_normalizers[output.next_token.temperatures.indexOf(1)],
              ),
            ),
          ]
        : null;
    case "mask": {
      const masked = output.steps.find((/** @type {any} */ { token }) => isMaskToken(token));
      return masked
        ? ["The most likely word for the mask is ", strong(best(masked)[0]), probability(best(masked)[1])]
        : ["This text has no masked word"];
    }
    case "labels":
    case "answer":
      return output.steps[0]?.likeliest?.length
        ? [
            "The model’s answer is ",
            strong(output.kind === "answer" ? output.text : best(output.steps[0])[0]),
            probability(
              output.kind === "answer"
                ? (output.steps[0].probability ?? best(output.steps[0])[1])
                : best(output.steps[0])[1],
            ),
          ]
        : null;
    case "embedding":
      return ["The model embeds this text"];
    default:
      return null;
  }
}

/**
 * Where the attention of one head goes, over all tokens: evenly, or to which token with which share, and to which words.
 * @param {any} scene @param {Attentions} attentions @param {HeadRef} selected @returns {any[] | null}
 */
function attentionClause(scene, attentions, selected) {
  const { rows, columns } = attentions.axesOf(selected.attention, false);
  const map = attentions.map(selected, false);
  if (!map.isMaterialized) return null;
  const { output, image } = scene;
  const kind = image ? "image" : output?.kind;
  const rowOf = {
    continuation: () => map.rows - 1,
    mask: () => output.steps.findIndex((/** @type {any} */ { token }) => isMaskToken(token)),
    image: () => image.single_query[selected.attention],
  };
  const only = rowOf[kind]?.() ?? -1;
  // A row that attends to nothing has no shares.
  const list = (only >= 0 && only < map.rows ? [only] : map.sampleRows())
    .map((row) => map.exactRow(row))
    .filter((row) => row.some((/** @type {number} */ weight) => weight > 0));
  if (!list.length) return null;
  const shares = Float64Array.from(columns.labels, (_, i) => list.reduce((sum, row) => sum + row[i] / list.length, 0));
  const attention = attentions.byName.get(selected.attention);
  const where = selected.head === "mean" ? "in the mean of the heads " : attention.heads > 1 ? "in this head " : "";
  const even = evenness(list);
  if (even >= MIN_DIFFUSE)
    return ["; ", where, `attention is almost uniform (entropy ${Math.floor(100 * even)}% of the maximum)`];
  const whose = only < 0 ? "attention" : { continuation: "the last token’s attention", mask: "the mask’s attention" };
  const goes = ` of ${whose[kind] ?? "attention"} goes to `;
  const isNamed = (/** @type {number} */ i) =>
    image ? i >= (image.first[attention.columns] ?? 0) : isWord(columns, i);
  const name = (/** @type {number} */ i) => (image ? html("strong", {}, columns.labels[i]) : quoted(columns, i));
  const best = argmax(shares);
  const first = ["; ", where, percent(shares[best]), goes, name(best)];
  const rests = !isNamed(best);
  if (rests && !image && (columns.wordAt(best) ?? -1) < 0) first.push(" (a resting place)");
  const pairs = kind === "translation" ? clearestPairs(map, rows, columns) : [];
  if (pairs.length)
    return [
      rests ? [first, "; "] : ["; ", where],
      enumerate(
        pairs.map(({ row, column }, i) => [
          quoted(rows, row),
          i ? " to " : " attends most to ",
          quoted(columns, column),
        ]),
      ),
    ];
  const others = topK(shares, columns.length)
    .filter(
      (i) => i !== best && (isNamed(i) || !rests) && shares[i] >= Math.max(MIN_WEIGHT, MIN_ABOVE / columns.length),
    )
    .slice(0, image ? 1 : MAX_NAMED - 1);
  if (!others.length) return first;
  return rests
    ? [
        first,
        `; among ${image ? "patches" : "words"}, most to `,
        enumerate(others.map((i) => [name(i), ` (${percent(shares[i])})`])),
      ]
    : [first, ", ", enumerate(others.map((i) => [`${percent(shares[i])} to `, name(i)]))];
}

/**
 * The sentence, as children of an element; null if the scene has no output.
 * @param {any} scene @param {Attentions} attentions @param {HeadRef} selected the head on display
 * @returns {Promise<any[] | null>}
 */
export async function summarySentence(scene, attentions, selected) {
  const clause = scene.compared && typeof scene.similarity !== "number" ? null : outputClause(scene);
  if (!clause) return null;
  if (selected.attention === null) return [clause, "."];
  await attentions.load(selected.attention);
  return [clause, attentionClause(scene, attentions, selected), "."];
}

/* The output of the model at the top of the page: the sentence, the output, and the probability of every prediction. */

/**
 * @typedef {{token: string, name: string, probability: number | null, likeliest: [string, number][]}} Step
 * @typedef {{tokens: string[], texts: string[], logprobs: number[], log_normalizers: number[], temperatures:
 * number[]}} NextToken
 * @typedef {{kind: string, text: string, logprob: number | null, steps: Step[], input_steps: Step[], next_token:
 * NextToken | null}} Output
 */

/** Maximum number of tokens with probabilities. */
const MAX_OUTPUT_TOKENS = 200;
/** Number of candidates for the next token. */
const MAX_NEXT_TOKENS = 6;
/** Maximum length of a token in the bars. */
const MAX_BAR_LABEL = 28;

/**
 * Probabilities of the next token at a temperature. @param {NextToken} next @param {number} temperature
 * @returns {number[]}
 */
export function temperedProbabilities(next, temperature) {
  const normalizer = next.log_normalizers[next.temperatures.indexOf(temperature)];
  return next.logprobs.map((logprob) => Math.exp(logprob / temperature - normalizer));
}

/** The index of the most interesting step: the least certain one that is not a special token. @param {Step[]} steps */
function leastCertain(steps) {
  const isSpecial = (/** @type {Step} */ { token }) => /^<.*>$|^\[[A-Z]+\]$/.test(token);
  let best = 0;
  steps.forEach((step, i) => {
    const better = (step.probability ?? 2) < (steps[best].probability ?? 2) || isSpecial(steps[best]);
    if (!isSpecial(step) && better) best = i;
  });
  return best;
}

export class OutputSection {
  /**
   * @param {import("../core/host.js").Host} host
   * @param {{point: (step: number | null) => void, append: ((text: string) => void) | null}} handlers `point`: a token
   * of the
   * output is under the pointer; `append`: appends text to the input of the model, if there is one
   */
  constructor(host, handlers) {
    const { scene } = host;
    this.scene = scene;
    this.handlers = handlers;
    /** @type {Output | null} */
    this.output = scene.output ?? null;
    this.steps = (this.output?.steps ?? []).slice(0, MAX_OUTPUT_TOKENS);
    this.hasForm = host.fields.includes("source");
    this.temperature = 1;
    /** @type {HTMLElement | null} */
    this.panel = null;
    /** Whether the bars are those of the token after the text. */
    this.showsNext = Boolean(this.output?.next_token);
    const masked = this.steps.findIndex(({ token }) => isMaskToken(token));
    this.selected = masked >= 0 ? masked : leastCertain(this.steps);
    this.bars = html("section", { class: "prediction", id: uniqueId("prediction"), "aria-label": "Probabilities" });
    this.tokens = this.tokenButtons();
    this.summary = html("p", { class: "headline", hidden: true });
    this.element = html("div", { class: "output-section" }, this.heading(), this.hasBars ? this.bars : null);
    if (this.hasBars) this.select(this.selected);
  }

  get hasBars() {
    return this.output !== null && (this.steps.length > 0 || this.output.next_token !== null);
  }

  /** Whether the tokens of the output, or of a text with masked tokens, can be selected. */
  get hasTokens() {
    return ["translation", "continuation", "mask"].includes(this.output?.kind) && this.steps.length > 0;
  }

  /** The label of each step and whether a space precedes it. @returns {{label: string, space: boolean}[]} */
  labels() {
    const side = this.scene.sides[this.output.kind === "translation" ? "predicted" : "text"];
    const fits = this.output.kind !== "continuation" && side?.tokens.length === this.output.steps.length;
    let end = 0;
    return this.steps.map(({ token }, i) => {
      if (!fits) {
        // A space may be part of the token, or lie between two tokens of the text.
        const start = this.output.text.indexOf(token.trim(), end);
        const space =
          /^\s|^$/.test(token) ||
          this.output.kind !== "continuation" ||
          (start > 0 && /\s/.test(this.output.text[start - 1]));
        if (start >= 0) end = start + token.trim().length;
        return { label: makeVisible(token), space };
      }
      return { label: makeVisible(side.tokens[i]), space: side.words[i] < 0 || side.words[i] !== side.words[i - 1] };
    });
  }

  tokenButtons() {
    if (!this.hasTokens) return [];
    return this.labels().map(({ label }, i) => {
      const { probability } = this.steps[i];
      const button = html(
        "button",
        {
          type: "button",
          class: /^<.*>$|^\[[A-Z]+\]$/.test(label) ? "output-token special" : "output-token",
          "data-step": i,
          "aria-label":
            probability === null
              ? label
              : `${truncate(label, MAX_BAR_LABEL)}, probability ${formatProbability(probability)}`,
          "aria-describedby": this.bars.id,
          onpointerenter: () => this.point(i),
          onpointerleave: () => this.handlers.point(null),
          onfocus: () => this.point(i),
          onblur: () => this.handlers.point(null),
          onclick: () => this.point(i),
          onkeydown: (event) => this.key(event),
        },
        label,
        html("span", { class: "certainty", "aria-hidden": "true" }),
      );
      button.style.setProperty("--probability", String(probability ?? 0));
      return button;
    });
  }

  heading() {
    const { source, target } = this.scene.texts;
    const { sides } = this.scene;
    const answer = target || (this.output?.kind === "labels" ? this.output.text : "") || this.scene.image?.answer;
    const long = Math.max(source.length, answer?.length ?? 0) > 150;
    /** @param {any} children @param {string} kind @param {string | undefined} direction */
    const line = (children, kind, direction) =>
      html(
        "span",
        {
          class: `line ${kind}`,
          dir: direction ?? "auto",
          title: long && typeof children === "string" ? children.slice(0, 2000) : null,
        },
        children,
      );
    const words = this.tokens.length
      ? this.labels().map(({ space }, i) => [space && i ? " " : null, this.tokens[i]])
      : null;
    if (words && this.output.steps.length > this.steps.length) words.push([" …", null]);
    const isMask = this.output?.kind === "mask" && words;
    // Where the sentence can be edited, the field shows it; where tokens can be selected, they show the text.
    const sourceLine = source
      ? line(
          source.slice(0, 600),
          this.hasForm || isMask ? "source visually-hidden" : "source",
          sides.source?.direction,
        )
      : null;
    const targetText = this.output?.kind === "continuation" ? this.output.text : answer;
    const targetLine = targetText
      ? line(targetText.slice(0, 600), words ? "target visually-hidden" : "target", sides.target?.direction)
      : null;
    const tokens = words
      ? html(
          "p",
          {
            class: `line ${isMask ? "source" : "target"} output-tokens`,
            role: "group",
            "aria-label": "Tokens with probabilities",
            dir: (sides.predicted ?? sides.text)?.direction ?? "auto",
          },
          words,
        )
      : null;
    const mixed = answer && sides.source?.direction !== sides.target?.direction && sides.target;
    const classes = [
      "texts",
      long && "long",
      Math.max(source.length, answer?.length ?? 0) > 400 && "very-long",
      mixed && "mixed",
    ];
    const forced = this.scene.compared?.some((/** @type {any} */ one) => one.own_output);
    return html(
      "div",
      { class: classes.filter(Boolean).join(" ") },
      html(
        "h1",
        {},
        sourceLine || targetLine ? [sourceLine, sourceLine && targetLine ? " " : null, targetLine] : this.scene.title,
      ),
      tokens,
      this.summary,
      typeof this.scene.similarity === "number" ? this.similarity() : null,
      forced
        ? html(
            "p",
            { class: "secondary" },
            "All models are given this translation (teacher forcing), so that their rows are the same. What each outputs itself is written above its map.",
          )
        : null,
    );
  }

  /** Shows the sentence that summarizes output and attention. @param {any[] | null} children */
  setSummary(children) {
    this.summary.hidden = children === null;
    setChildren(this.summary, children ?? []);
  }

  /** The similarity of two embedded texts. */
  similarity() {
    const { similarity } = this.scene;
    const bar = html("span", { class: "bar" });
    bar.style.width = `${100 * Math.max(0, similarity)}%`;
    return html(
      "p",
      { class: "similarity" },
      "Cosine similarity of the two texts ",
      html("span", { class: "track" }, bar),
      html("strong", {}, withMinus(similarity.toFixed(3))),
    );
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const now = this.tokens.indexOf(/** @type {any} */ (event.target));
    const moves = {
      ArrowRight: now + 1,
      ArrowDown: now + 1,
      ArrowLeft: now - 1,
      ArrowUp: now - 1,
      Home: 0,
      End: this.tokens.length - 1,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.tokens[Math.max(0, Math.min(this.tokens.length - 1, moves[event.key]))].focus();
  }

  /** @param {number} step */
  point(step) {
    this.showsNext = false;
    this.select(step);
    this.handlers.point(step);
  }

  /** Shows the alternatives of a step. @param {number} step */
  select(step) {
    this.selected = step;
    this.tokens.forEach((button, i) => {
      setAttributes(button, { tabindex: i === step ? 0 : -1, "data-on": !this.showsNext && i === step });
    });
    if (this.showsNext) return this.showNext();
    const { token, name: own, probability, likeliest } = this.steps[step];
    const isMask = this.output.kind === "mask";
    const isListed =
      likeliest.some(([name]) => name === own) || probability === null || token === "" || isMaskToken(token);
    const all = isListed ? likeliest : [...likeliest, /** @type {[string, number]} */ ([own, probability])];
    const label = this.tokens.length ? this.tokens[step].firstChild.textContent : makeVisible(token);
    const title =
      this.output.kind === "labels"
        ? ["Labels"]
        : isMask
          ? ["Guesses for ", html("q", {}, truncate(label, MAX_BAR_LABEL)), " if masked"]
          : ["Candidates for ", html("q", {}, truncate(label, MAX_BAR_LABEL))];
    setChildren(
      this.bars,
      html("h2", {}, title),
      this.barList(all.map(([name, share]) => ({ name, share, on: name === own }))),
      this.output.next_token
        ? html("button", { type: "button", class: "small", onclick: () => this.backToNext() }, "Show the next token")
        : null,
    );
  }

  backToNext() {
    this.showsNext = true;
    this.select(this.selected);
  }

  /** Shows the distribution of the token after the text. */
  showNext() {
    const { next_token: next } = this.output;
    const list = html("div", {});
    const draw = () => {
      const shares = temperedProbabilities(next, this.temperature).slice(0, MAX_NEXT_TOKENS);
      setChildren(
        list,
        this.barList(
          next.tokens
            .slice(0, MAX_NEXT_TOKENS)
            .map((name, i) => ({ name, share: shares[i], on: false, append: next.texts[i] })),
          shares,
        ),
      );
    };
    const value = html("output", {}, this.temperature.toFixed(1));
    const slider = html("input", {
      type: "range",
      min: next.temperatures[0],
      max: next.temperatures.at(-1),
      step: 0.1,
      "aria-label": "Temperature",
      oninput: () => {
        this.temperature = Number(Number(slider.value).toFixed(1));
        value.textContent = this.temperature.toFixed(1);
        draw();
      },
    });
    slider.value = String(this.temperature);
    draw();
    setChildren(
      this.bars,
      html(
        "h2",
        {},
        "Next token",
        this.handlers.append ? html("span", { class: "secondary" }, " (select one to append it)") : null,
      ),
      list,
      html("label", { class: "temperature", "data-export": "no" }, "Temperature ", slider, value),
    );
  }

  /**
   * @param {{name: string, share: number, on: boolean, append?: string}[]} entries
   * @param {number[]} [shares] of which the rest is listed
   */
  barList(entries, shares) {
    const rtl = (this.scene.sides.predicted ?? this.scene.sides.text)?.direction === "rtl";
    const rest = shares ? 1 - shares.reduce((sum, share) => sum + share, 0) : 0;
    return html(
      "ol",
      { class: "ranks" },
      entries.map(({ name, share, on, append }) => {
        const bar = html("span", { class: "bar" });
        bar.style.width = `${100 * share}%`;
        const label = tokenText(truncate(makeVisible(name), MAX_BAR_LABEL), rtl);
        const canAppend = append && this.handlers.append;
        return html(
          "li",
          { class: on ? "on" : "" },
          html(
            "span",
            { class: "name" },
            canAppend
              ? html("button", { type: "button", class: "append", onclick: () => this.handlers.append(append) }, label)
              : label,
          ),
          html("span", { class: "track" }, bar),
          html("span", { class: "weight" }, formatProbability(share)),
        );
      }),
      rest > 0.0005
        ? html(
            "li",
            {},
            html("span", { class: "name secondary" }, "all others"),
            html("span", { class: "track" }),
            html("span", { class: "weight" }, formatProbability(rest)),
          )
        : null,
    );
  }

  /** Adds a panel next to the texts, if there is one. @param {HTMLElement | null} panel */
  addPanel(panel) {
    this.panel = panel;
    if (panel) this.element.append(panel);
  }

  /** In other views than that of attention, only the texts are shown; step by step, the tokens say them. @param {string} view */
  setView(view) {
    const compact = view !== "attention";
    this.bars.hidden = compact;
    this.summary.toggleAttribute("data-compact", compact);
    if (this.panel) this.panel.hidden = compact;
    setAttributes(this.element, { "data-compact": compact ? view : null });
  }
}

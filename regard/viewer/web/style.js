/** How everything looks. All of it stands under one class, for a notebook has a style of its own. */

const LIGHT = `
  color-scheme: light;
  --paper: #faf9f7; --sheet: #ffffff; --ink: #1c1f24; --soft: #5a606b; --line: #e5e3de; --hover: #f0eeea; --raised: #ffffff; --knob: #cfccc5;
  --first: #1d5fb4; --first-soft: #e3edf9; --second: #a34e00; --second-soft: #fbeadb; --gold: #b8860b;
  --ring: #0b0d10; --light: #ffffff; --dark: #000000; --shadow: 0 1px 2px rgb(30 25 15 / 5%), 0 8px 28px rgb(30 25 15 / 5%);`;
const DARK = `
  color-scheme: dark;
  --paper: #121417; --sheet: #1a1d21; --ink: #eae8e3; --soft: #a3a8b1; --line: #2c3036; --hover: #24282e; --raised: #3a4048; --knob: #474e57;
  --first: #82b4f2; --first-soft: #1f3048; --second: #f0a560; --second-soft: #3d2b1a; --gold: #e8c25a;
  --ring: #ffffff; --light: #ffffff; --dark: #000000; --shadow: 0 1px 2px rgb(0 0 0 / 30%);`;

export const STYLE = `
.regard { ${LIGHT} }
@media (prefers-color-scheme: dark) { .regard { ${DARK} } }
.regard[data-theme="light"] { ${LIGHT} }
.regard[data-theme="dark"] { ${DARK} }

body:has(> #regard) { margin: 0; }
#regard > .regard { min-height: 100vh; }
.regard {
  --sans: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, Charter, "Source Serif 4", "Noto Serif", "DejaVu Serif", Georgia, serif;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 var(--sans); font-variant-numeric: tabular-nums;
  padding: 0 clamp(16px, 3.4vw, 56px) 72px; box-sizing: border-box; container: regard / inline-size;
  -webkit-font-smoothing: antialiased; text-rendering: optimizeLegibility;
}
.regard *, .regard *::before, .regard *::after { box-sizing: border-box; }
.regard h1, .regard h2, .regard p, .regard dl, .regard dd, .regard ol { margin: 0; padding: 0; font-weight: inherit; }
.regard [hidden] { display: none !important; }
.regard .unseen { position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.regard :focus { outline: none; }
.regard :focus-visible { outline: 2px solid var(--first); outline-offset: 3px; border-radius: 6px; }
.regard .failed { max-width: 60ch; margin: 20vh auto; font-size: 18px; }

/* The bar at the top. */
.regard .top { display: flex; align-items: center; gap: 20px; padding: 22px 0 0; }
.regard .brand { display: flex; align-items: center; gap: 10px; }
.regard .brand .eye { width: 30px; height: 19px; fill: none; stroke: var(--ink); stroke-width: 1.6; }
.regard .brand .eye circle { fill: var(--first); stroke: none; }
.regard .brand .name { font: 600 19px/1 var(--serif); letter-spacing: .01em; }
.regard .model { color: var(--soft); font-size: 14px; flex: 1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .tools { display: flex; align-items: center; gap: 6px; }
.regard .icon { width: 20px; height: 20px; fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linecap: round; stroke-linejoin: round; }
.regard button, .regard summary, .regard select { font: inherit; color: inherit; cursor: pointer; }
.regard .round { display: inline-grid; place-items: center; width: 36px; height: 36px; padding: 0; border: 0; border-radius: 50%; background: none; color: var(--soft); transition: background .15s, color .15s; }
.regard .round:hover { background: var(--hover); color: var(--ink); }
.regard .round:disabled { opacity: .35; cursor: default; background: none; }
.regard .round:focus-visible { border-radius: 50%; outline-offset: 1px; }
.regard .small { border: 1px solid var(--line); background: var(--sheet); border-radius: 8px; padding: 5px 12px; font-size: 14px; }
.regard .small:hover { background: var(--hover); }
.regard .small:disabled { opacity: .45; cursor: default; }
.regard .menu { position: relative; }
.regard .menu summary { display: flex; align-items: center; gap: 7px; list-style: none; padding: 6px 14px 6px 10px; border-radius: 18px; border: 1px solid var(--line); background: var(--sheet); font-size: 15px; }
.regard .menu summary::-webkit-details-marker { display: none; }
.regard .menu summary:hover { background: var(--hover); }
.regard .menu .sheet { position: absolute; z-index: 5; right: 0; top: calc(100% + 8px); min-width: 220px; padding: 8px; background: var(--sheet); border: 1px solid var(--line); border-radius: 14px; box-shadow: var(--shadow); }
.regard .menu .sheet button { display: block; width: 100%; text-align: start; padding: 8px 12px; border: 0; border-radius: 8px; background: none; font-size: 15px; }
.regard .menu .sheet button:hover { background: var(--hover); }

/* The text that is looked at. */
.regard .top .tabs { margin-inline-end: 8px; }
.regard .texts { padding: clamp(18px, 3.4vh, 36px) 0 clamp(18px, 3.2vh, 34px); max-width: 1100px; }
.regard .texts.mixed .line { text-align: left; }
.regard .texts h1 { font: 400 clamp(22px, 2.5cqw, 33px)/1.32 var(--serif); letter-spacing: -.005em; }
.regard .texts .target { color: var(--soft); }
.regard .texts .line { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden; overflow-wrap: anywhere; }
.regard .texts.long h1 { font-size: 19px; line-height: 1.45; }
.regard .texts.endless .line { -webkit-line-clamp: 1; }
.regard .texts .line + .line { margin-top: 4px; }

/* Overview, figure, reading: side by side while there is room. */
.regard .columns { display: grid; gap: 28px clamp(22px, 2.3cqw, 48px); grid-template-columns: minmax(0, 1fr); align-items: start; }
@container regard (min-width: 790px) {
  .regard .columns { grid-template-columns: clamp(220px, 23cqw, 350px) minmax(0, 1fr); }
  .regard .side { grid-column: 2; }
  .regard .overview { grid-row: span 2; }
}
@container regard (min-width: 1150px) {
  .regard .columns { grid-template-columns: clamp(220px, 19cqw, 320px) minmax(0, 1fr) clamp(230px, 17.5cqw, 300px); }
  .regard .side { grid-column: auto; }
  .regard .heads[data-two] .columns { grid-template-columns: clamp(200px, 17cqw, 280px) minmax(0, 1fr); }
  .regard .heads[data-two] .side { grid-column: 2; }
}

.regard .columns:has(> .overview[hidden]) { grid-template-columns: minmax(0, 1fr); }
@container regard (min-width: 1150px) { .regard .columns:has(> .overview[hidden]) { grid-template-columns: minmax(0, 1fr) clamp(230px, 20cqw, 320px); } }
.regard .columns:has(> .overview[hidden]) .side { grid-column: auto; }
.regard .overview { display: grid; gap: 22px; min-width: 0; }
.regard .group { min-width: 0; }
.regard .group h2 { font: 500 14.5px/1.3 var(--sans); margin: 0 0 4px; }
.regard .group h2 .size { color: var(--soft); display: block; font-weight: 400; font-size: 12.5px; }
.regard .grid { display: grid; gap: 3px; overflow-x: auto; padding: 3px; margin: -3px; }
.regard .line { display: grid; gap: 4px; align-items: center; }
.regard .grid .line { grid-template-columns: minmax(18px, max-content) repeat(var(--heads), minmax(18px, 58px)); }
.regard .grid .line.heads { color: var(--soft); font-size: 11.5px; text-align: center; line-height: 1.4; }
.regard .grid .heads .mean { font-size: 10px; letter-spacing: -.02em; }
.regard .grid .layer, .regard .grid .corner { color: var(--soft); font-size: 11.5px; text-align: end; padding-inline-end: 4px; max-width: 110px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .thumb { aspect-ratio: 1; border-radius: 5px; background: var(--hover); cursor: pointer; position: relative; overflow: hidden; }
.regard .thumb canvas { position: absolute; inset: 0; width: 100%; height: 100%; image-rendering: pixelated; visibility: hidden; }
.regard .thumb[data-drawn] canvas { visibility: visible; }
.regard .thumb .frame { position: absolute; inset: 0; border-radius: inherit; border: 1px solid var(--line); }
.regard .thumb:hover .frame { border: 2px solid var(--soft); }
.regard .thumb[data-mark="first"] .frame, .regard .thumb[data-mark="both"] .frame { border: 3px solid var(--first); }
.regard .thumb[data-mark="second"] .frame { border: 3px solid var(--second); }
.regard .thumb:focus-visible { outline-offset: 1px; border-radius: 5px; }

.regard .stage { min-width: 0; }
.regard .bar { display: flex; flex-wrap: wrap; align-items: center; gap: 10px 22px; margin-bottom: 16px; }
.regard .tabs { display: inline-flex; gap: 2px; padding: 3px; border-radius: 12px; background: var(--hover); }
.regard .tabs button { border: 0; background: none; border-radius: 9px; padding: 6px 16px; font-size: 15px; color: var(--soft); transition: background .15s; }
.regard .tabs button:hover { color: var(--ink); }
.regard .tabs [aria-selected="true"] { background: var(--raised); color: var(--ink); box-shadow: 0 1px 3px rgb(0 0 0 / 10%); }
.regard .toggles { display: flex; flex-wrap: wrap; gap: 4px 18px; }
.regard .toggle { display: inline-flex; align-items: center; gap: 9px; border: 0; background: none; padding: 4px 2px; font-size: 15px; color: var(--soft); }
.regard .toggle:hover, .regard .toggle[aria-pressed="true"] { color: var(--ink); }
.regard .knob { width: 30px; height: 18px; border-radius: 9px; background: var(--knob); position: relative; transition: background .15s; }
.regard .knob::after { content: ""; position: absolute; left: 2px; top: 2px; width: 14px; height: 14px; border-radius: 50%; background: #fff; box-shadow: 0 1px 2px rgb(0 0 0 / 25%); transition: transform .15s; }
.regard .toggle[aria-pressed="true"] .knob { background: var(--first); }
.regard .toggle[aria-pressed="true"] .knob::after { transform: translateX(12px); }
.regard .pickers { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 14px; color: var(--soft); margin-inline-start: auto; }
.regard select { appearance: none; border: 1px solid transparent; border-radius: 8px; padding: 3px 26px 3px 8px; color: var(--ink); max-width: 100%; text-overflow: ellipsis;
  field-sizing: content;
  background: linear-gradient(45deg, transparent 50%, var(--soft) 50%) calc(100% - 14px) 55% / 5px 5px no-repeat, linear-gradient(-45deg, transparent 50%, var(--soft) 50%) calc(100% - 9px) 55% / 5px 5px no-repeat; }
.regard select:hover { background-color: var(--hover); }
.regard select option, .regard select optgroup { background: var(--sheet); color: var(--ink); }

.regard .sheet-of-paper { background: var(--sheet); border: 1px solid var(--line); border-radius: 18px; padding: round(clamp(16px, 2cqw, 30px), 1px); box-shadow: var(--shadow); } /* whole pixels, as in pictures of it */
.regard .panels { display: grid; gap: 28px 36px; grid-template-columns: minmax(0, 1fr); }
@container regard (min-width: 920px) { .regard .heads[data-two] .panels { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.regard .panel { min-width: 0; }
.regard .panel header { display: flex; align-items: center; gap: 10px; }
.regard .panel h2 { display: flex; flex-wrap: wrap; gap: 0 4px; min-width: 0; font: 500 18px/1.3 var(--sans); margin-inline-start: -8px; }
.regard .panel .mark { display: none; }
.regard .heads[data-two] .panel .mark { display: inline-grid; place-items: center; width: 26px; height: 26px; border-radius: 50%; font: 600 14px/1 var(--sans); color: var(--paper); background: var(--first); margin-inline-end: 6px; flex: none; }
.regard .heads[data-two] .panel[data-mark="second"] .mark { background: var(--second); }
.regard .panel .steps { margin-inline-start: auto; display: flex; flex: none; }
.regard .panel .says { color: var(--soft); font-size: 14.5px; margin: 2px 0 14px; }
.regard .heads[data-two] .panel[data-active] header { box-shadow: 0 2px 0 -0px var(--first-soft); }
.regard .heads[data-two] .panel[data-active][data-mark="second"] header { box-shadow: 0 2px 0 0 var(--second-soft); }

.regard .figure { position: relative; min-width: 0; touch-action: pan-x pan-y; }
.regard .figure svg { display: block; overflow: visible; user-select: none; max-width: none; }
.regard .heat, .regard .lines { cursor: default; }
.regard .heat .cells { position: absolute; image-rendering: pixelated; }
.regard .heat svg { position: relative; }
.regard .progress { position: absolute; top: calc(100% + 4px); left: 0; font-size: 13px; color: var(--soft); }
.regard .progress:not(:empty) { margin-bottom: 26px; }
.regard text { fill: var(--ink); font-family: var(--sans); }
.regard text.label.on { font-weight: 650; fill: var(--first); }
.regard [data-mark="second"] text.label.on { fill: var(--second); }
.regard text.count { fill: var(--soft); }
.regard text.number { pointer-events: none; }
.regard text.number.light { fill: var(--light); }
.regard text.number.dark { fill: var(--dark); }
.regard .tick { stroke: var(--soft); stroke-width: 1; fill: none; }
.regard .edge { fill: none; stroke: var(--line); }
.regard .band { fill: none; stroke: var(--first); stroke-opacity: .55; stroke-width: 1.5; }
.regard .band.pin { stroke-dasharray: 3 3; }
.regard .hair { stroke: var(--first); stroke-width: 1; stroke-opacity: .75; fill: none; }
.regard .hair.pin { stroke-dasharray: 4 3; }
.regard .ring { fill: none; stroke: var(--ring); stroke-width: 2.5; }
.regard [data-mark="second"] .band, .regard [data-mark="second"] .hair { stroke: var(--second); }
.regard .chip { fill: var(--first); }
.regard [data-mark="second"] .chip { fill: var(--second); }
.regard text.chip-text { fill: var(--sheet); font-weight: 600; }
.regard .selection { fill: var(--first); fill-opacity: .12; stroke: var(--first); stroke-width: 1.5; }
.regard .gold { fill: var(--gold); stroke: var(--sheet); stroke-width: 1; }

.regard .lines path { fill: none; stroke: var(--first); stroke-linecap: round; }
.regard [data-mark="second"] .lines path { stroke: var(--second); }
.regard .lines .idle { transition: opacity .15s; }
.regard .lines .chosen .idle { opacity: .14; }
.regard .lines text.dim { fill: var(--soft); }
.regard text.heading { fill: var(--soft); }
.regard text.weight { fill: var(--soft); }
.regard text.weight.on { fill: var(--ink); font-weight: 650; }
.regard text.outside { fill: var(--soft); font-style: italic; }

.regard .prose { display: grid; gap: 22px; padding: 4px 0; }
.regard .passage .heading { font-size: 13px; color: var(--ink); margin-bottom: 6px; font-weight: 500; }
.regard .passage .does { color: var(--soft); font-weight: 400; }
.regard .passage .words { font: 400 25px/1.75 var(--serif); overflow-wrap: anywhere; }
.regard .prose.long .words { font-size: 17px; line-height: 1.7; max-height: 46vh; overflow-y: auto; padding: 2px 6px 2px 2px; }
.regard .token { border-radius: 5px; padding: .08em .14em; margin: 0 -.04em; cursor: pointer; transition: background .1s; }
.regard .token.light { color: var(--light); }
.regard .token.dark { color: var(--dark); }
.regard .token:hover { box-shadow: 0 0 0 1.5px var(--soft); }
.regard .token.on { box-shadow: 0 0 0 2px var(--first); }
.regard [data-mark="second"] .token.on { box-shadow: 0 0 0 2px var(--second); }

.regard .table .scroll { overflow: auto; max-height: 70vh; border: 1px solid var(--line); border-radius: 10px; }
.regard .turner { font-size: 14px; color: var(--soft); margin-bottom: 10px !important; }
.regard table { border-collapse: separate; border-spacing: 0; font-size: 14px; }
.regard th, .regard td { padding: 6px 12px; text-align: end; white-space: nowrap; border-bottom: 1px solid var(--line); }
.regard thead th { position: sticky; top: 0; background: var(--sheet); font-weight: 600; z-index: 1; }
.regard tbody th, .regard td.corner { position: sticky; inset-inline-start: 0; background: var(--sheet); font-weight: 600; z-index: 1; }
.regard td.corner { top: 0; z-index: 2; }
.regard tbody tr:last-child > * { border-bottom: 0; }
.regard td.cursor { background: var(--first-soft); }
.regard td.pin { box-shadow: inset 0 0 0 2px var(--first); }

.regard .foot { display: flex; flex-wrap: wrap; align-items: center; gap: 12px 24px; margin-top: 22px; min-height: 36px; }
.regard .heads[data-form="lines"] .legend, .regard .heads[data-form="table"] .legend { display: none; }
.regard .heads[data-form="lines"] .foot, .regard .heads[data-form="table"] .foot { display: none; }
.regard .legend { display: flex; align-items: center; gap: 14px; font-size: 13px; color: var(--soft); }
.regard .legend .scale { width: clamp(150px, 22cqw, 240px); padding-bottom: 18px; margin-top: 9px; position: relative; }
.regard .legend canvas { display: block; width: 100%; height: 10px; border-radius: 5px; }
.regard .legend .ticks { position: absolute; inset: 13px 5px auto; height: 18px; }
.regard .legend .tick { position: absolute; transform: translateX(-50%); font-size: 12px; }
.regard .gold-key { display: inline-flex; align-items: center; gap: 6px; }
.regard .gold-key i { width: 9px; height: 9px; border-radius: 50%; background: var(--gold); }
.regard .zoomer { display: flex; align-items: center; gap: 2px; }
.regard .where { position: relative; width: 60px; height: 60px; margin-inline-end: 8px; cursor: pointer; border-radius: 6px; overflow: hidden; background: var(--hover); }
.regard .where > * { position: absolute; inset: 0; width: 100%; height: 100%; image-rendering: pixelated; }
.regard .where .box { fill: var(--second); fill-opacity: .22; stroke: var(--second); stroke-width: 3; }

.regard .side { display: grid; gap: 34px; min-width: 0; align-content: start; }
@container regard (min-width: 1150px) { .regard .reading { min-height: 290px; } }
.regard .reading .hint { color: var(--soft); font-size: 16px; max-width: 34ch; }
.regard .reading .one + .one { margin-top: 28px; }
.regard .reading h2 { font: 400 23px/1.3 var(--serif); overflow-wrap: anywhere; }
.regard .reading .verb { color: var(--soft); }
.regard .reading .subject { font-weight: 600; }
.regard .reading .pinned { font: 500 12px/1 var(--sans); color: var(--first); background: var(--first-soft); border-radius: 9px; padding: 3px 9px; margin-inline-start: 10px; vertical-align: 3px; }
.regard .reading .exact { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; margin: 8px 0 12px; font-size: 17px; padding-bottom: 10px; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.regard .reading output { font-weight: 600; }
.regard .ranks { list-style: none; display: grid; gap: 7px; margin: 10px 0 12px; }
.regard .ranks li { display: grid; grid-template-columns: minmax(0, 6.4em) 1fr 3.4em; gap: 10px; align-items: center; font-size: 15px; }
.regard .ranks .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .ranks .on .name { font-weight: 650; }
.regard .ranks .track { height: 8px; border-radius: 4px; background: var(--hover); overflow: hidden; }
.regard .ranks .bar { display: block; height: 100%; margin: 0; border-radius: 4px; background: var(--first); }
.regard .one[data-mark="second"] .bar { background: var(--second); }
.regard .one h2 .mark { display: inline-grid; place-items: center; width: 24px; height: 24px; border-radius: 50%; font: 600 13px/1 var(--sans); color: var(--paper); background: var(--first); margin-inline-end: 10px; vertical-align: 2px; }
.regard .one[data-mark="second"] h2 .mark { background: var(--second); }
.regard .ranks .weight { text-align: end; color: var(--soft); font-size: 14px; }
.regard .ranks.pairs li { grid-template-columns: minmax(0, 1fr) 3.6em; }
.regard .ranks .to { color: var(--soft); padding: 0 .35em; }
.regard .reading .hint + .ranks { margin-top: 14px; }
.regard .reading h2.quiet { color: var(--soft); font-size: 20px; }
.regard .rest { color: var(--soft); font-size: 14px; }
@container regard (min-width: 920px) {
  .regard .heads[data-two] .reading { display: grid; grid-template-columns: 1fr 1fr; gap: 36px; }
  .regard .heads[data-two] .reading .one + .one { margin-top: 0; }
}

.regard .measures { border-top: 1px solid var(--line); padding-top: 22px; }
.regard .values dl { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.regard .measure dt { font-size: 13.5px; color: var(--soft); }
.regard .measure .figures { display: flex; gap: 16px; }
.regard .measure .value { font: 400 28px/1.2 var(--serif); }
.regard .measure .value[data-mark="first"] { color: var(--first); }
.regard .measure .value[data-mark="second"] { color: var(--second); }
.regard .measure .says { display: block; font-size: 13.5px; line-height: 1.45; color: var(--soft); }
.regard .note { margin-top: 22px !important; font-size: 14px; line-height: 1.55; color: var(--soft); max-width: 62ch; }
.regard .note strong { color: var(--ink); font-weight: 600; }

.regard .help { border: 1px solid var(--line); border-radius: 18px; padding: 28px 32px; max-width: 560px; background: var(--sheet); color: var(--ink); box-shadow: var(--shadow); }
.regard .help::backdrop { background: rgb(0 0 0 / 35%); }
.regard .help h2 { font: 400 26px/1.2 var(--serif); margin-bottom: 16px; }
.regard .help dl > div { display: grid; grid-template-columns: 176px 1fr; gap: 16px; padding: 5px 0; font-size: 15px; }
.regard .help dt { color: var(--soft); }
.regard .help p { color: var(--soft); font-size: 14px; margin: 16px 0; }
.regard kbd { font: 500 13px/1 var(--sans); border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 6px; padding: 2px 7px; margin-inline-end: 4px; background: var(--paper); color: var(--ink); }

@container regard (max-width: 789px) {
  .regard .stage { order: -1; }
  .regard .side { order: 0; }
  .regard .overview { order: 1; }
  .regard .all-first .overview { order: -2; }
  .regard .sheet-of-paper { border-radius: 14px; padding: 14px; margin-inline: -8px; }
  .regard .model { display: none; }
  .regard .tools { margin-inline-start: auto; }
  .regard .top { flex-wrap: wrap; }
  .regard .top .tabs { order: 1; flex-basis: 100%; margin: 0; overflow-x: auto; }
  .regard .top .tabs button { flex: 1; padding-inline: 10px; white-space: nowrap; }
}
@media (prefers-reduced-motion: reduce) { .regard *, .regard *::after { transition: none !important; animation: none !important; } }
@media (forced-colors: active) { .regard .thumb, .regard .cells, .regard .square, .regard .legend canvas { forced-color-adjust: none; } }
@media print { .regard .bar, .regard .tools, .regard .zoomer { display: none; } .regard { padding: 0; } }
`;

/** How pictures look. */

export const IMAGE_STYLE = `
.regard .images .thumb { aspect-ratio: var(--aspect); min-height: 10px; }
.regard .images .over-name { padding: 3px 8px; }
.regard .images .asks { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px; font-size: 14.5px; color: var(--soft); margin: 2px 0 14px; }
.regard .images .asks select { font-size: 14.5px; }
.regard .figure.patches { width: min(100%, calc(68vh * var(--aspect))); min-width: min(100%, 240px); aspect-ratio: var(--aspect); margin-inline: auto; cursor: crosshair; touch-action: pan-y; }
.regard .figure.patches:focus-visible { outline-offset: 5px; }
.regard .figure.patches canvas { position: absolute; inset: 0; width: 100%; height: 100%; }
.regard .figure.patches .veil, .regard .figure.patches[data-coarse] .photo { image-rendering: pixelated; }
.regard .figure.patches .marks { position: absolute; inset: 0; pointer-events: none; }
.regard .patch-lines { fill: none; stroke: #fff; stroke-opacity: .16; stroke-width: 1; }
.regard .marks .outer { fill: none; stroke: #000; stroke-width: 4; }
.regard .marks .inner { fill: none; stroke: #fff; stroke-width: 1.6; }
.regard .marks .outer.asker { stroke-width: 5.5; }
.regard .marks .inner.asker { stroke-width: 3; }
.regard .marks .inner.pointed { stroke-dasharray: 3 2; }
.regard .images .waits { min-height: 1.5em; margin-top: 8px; font-size: 13.5px; color: var(--soft); }
.regard .images .waits:empty { display: none; }
.regard .images .together { font-size: 13px; color: var(--soft); }
.regard .images .legend .tick { white-space: nowrap; }

.regard .says-labels h2, .regard .pixel-labels h2, .regard .queries h2 { font: 500 14.5px/1.3 var(--sans); margin-bottom: 8px; }
.regard .says-labels .about, .regard .pixel-labels .about { font-size: 13.5px; color: var(--soft); margin-top: 8px; }
.regard .label-list { list-style: none; display: grid; gap: 2px; margin: 0 -8px !important; max-height: 320px; overflow-y: auto; padding: 2px !important; }
.regard .label-list button { display: grid; grid-template-columns: minmax(0, 6.5em) 1fr max-content; gap: 10px; align-items: center; width: 100%; padding: 4px 8px; border: 1px solid transparent; border-radius: 8px; background: none; text-align: start; font-size: 15px; }
.regard .pixel-labels .label-list button { grid-template-columns: 16px minmax(0, 1fr) max-content; }
.regard .label-list button:hover { background: var(--hover); }
.regard .label-list button[aria-pressed="true"] { background: var(--first-soft); border-color: var(--first); }
.regard .label-list .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .label-list .track { height: 8px; border-radius: 4px; background: var(--hover); overflow: hidden; }
.regard .label-list button:hover .track, .regard .label-list button[aria-pressed="true"] .track { background: var(--line); }
.regard .label-list .bar { display: block; height: 100%; margin: 0; border-radius: 4px; background: var(--first); }
.regard .label-list .share { min-width: 3.6em; white-space: nowrap; text-align: end; color: var(--soft); font-size: 14px; }
.regard .swatch { width: 16px; height: 16px; border-radius: 4px; border: 1px solid var(--line); }

.regard .queries { margin-top: 24px; }
.regard .query-list { display: grid; grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); gap: 10px; }
.regard .query-list button { border: 0; background: none; padding: 0; text-align: start; border-radius: 8px; font-size: 13px; min-width: 0; }
.regard .query-list canvas { display: block; width: 100%; aspect-ratio: var(--aspect); border-radius: 6px; image-rendering: pixelated; border: 1px solid var(--line); }
.regard .query-list button:hover canvas { border-color: var(--soft); }
.regard .query-list button[aria-pressed="true"] canvas { box-shadow: 0 0 0 2.5px var(--first); }
.regard .query-list .name { display: block; margin-top: 3px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }

.regard .picture-of { position: relative; width: min(100%, 190px); aspect-ratio: var(--aspect); }
.regard .picture-of canvas { position: absolute; inset: 0; width: 100%; height: 100%; border-radius: 4px; }
.regard .follow .picture-of { width: min(100%, 200px, calc(110px * var(--aspect))); }
.regard .numbers-of .picture-of { margin: 2px 0 10px; }
.regard .picture-of .veil, .regard .picture-of[data-coarse] canvas { image-rendering: pixelated; }
.regard .tokens-of.with-picture { max-height: none; overflow: visible; align-items: center; gap: 6px 4px; }
.regard .picture-of .patches-of { position: absolute; inset: 0; display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); grid-template-rows: repeat(var(--rows), minmax(0, 1fr)); }
.regard .picture-of .chip-token { padding: 0; border-radius: 0; min-width: 0; border: 0; }
.regard .picture-of .chip-token:hover { background: rgb(255 255 255 / 35%); }
.regard .picture-of .chip-token[aria-checked="true"] { background: none; outline: 2px solid #fff; box-shadow: 0 0 0 4px #000; z-index: 1; }
.regard .picture-of .chip-token:focus-visible { outline: 3px solid var(--first); outline-offset: 2px; z-index: 2; }
@media (forced-colors: active) { .regard .figure.patches canvas, .regard .swatch, .regard .query-list canvas { forced-color-adjust: none; } }
`;

/** How the walk looks. */

export const WALK_STYLE = `
.regard .walk { max-width: 1040px; }
.regard .walk h2, .regard .walk h3, .regard .walk ol { margin: 0; padding: 0; font-weight: inherit; }
.regard .follow { position: sticky; top: 0; z-index: 3; display: grid; gap: 10px 28px; grid-template-columns: minmax(0, 1fr) auto; align-items: end; padding: 14px 0 12px; background: var(--paper); border-bottom: 1px solid var(--line); }
.regard .follow .sides { display: grid; gap: 8px; min-width: 0; }
.regard .side-of { display: grid; grid-template-columns: 6.4em minmax(0, 1fr); gap: 12px; align-items: baseline; }
.regard .side-name { color: var(--soft); font-size: 13.5px; text-align: end; }
.regard .tokens-of { display: flex; flex-wrap: wrap; gap: 4px; max-height: 76px; overflow-y: auto; padding: 3px; margin: -3px; }
.regard .chip-token { border: 1px solid transparent; background: none; border-radius: 8px; padding: 2px 9px; font: 400 17px/1.45 var(--serif); color: var(--ink); }
.regard .chip-token:hover { background: var(--hover); }
.regard .chip-token[aria-checked="true"] { background: var(--first-soft); border-color: var(--first); color: var(--ink); }
.regard .follow .choice { display: grid; gap: 4px; justify-items: end; font-size: 14px; color: var(--soft); }
.regard .walk .verdict { margin: 18px 0 4px; font-size: 15px; color: var(--soft); }
.regard .walk .verdict strong { font-weight: 600; color: var(--ink); }
.regard .walk .verdict[data-agrees="no"] strong { color: var(--second); }
.regard .walk > .note { margin: 4px 0 0 !important; }

.regard .stations { list-style: none; margin: 18px 0 0 !important; }
.regard .stations > li { position: relative; padding-inline-start: 34px !important; scroll-margin-top: 150px; }
.regard .stations > li::before { content: ""; position: absolute; inset-inline-start: 9px; top: 0; bottom: 0; width: 2px; background: var(--line); }
.regard .stations > li:first-child::before { top: 24px; }
.regard .stations > li:last-child::before { bottom: auto; height: 24px; }
.regard .stations > li::after { content: ""; position: absolute; inset-inline-start: 4px; top: 18px; width: 12px; height: 12px; border-radius: 50%; background: var(--paper); border: 2px solid var(--soft); }
.regard .stations > li[data-part="attention"]::after { border-color: var(--first); }
.regard .stations > li[data-part="output"]::after { border-color: var(--first); background: var(--first); }
.regard .stations > li:has(details[open])::after { background: var(--first); border-color: var(--first); }
.regard .stations summary { display: flex; align-items: baseline; gap: 14px; padding: 10px 12px; margin-inline-start: -12px; border-radius: 10px; list-style: none; }
.regard .stations summary::-webkit-details-marker { display: none; }
.regard .stations summary:hover { background: var(--hover); }
.regard .stations summary h2 { font: 400 19px/1.35 var(--serif); }
.regard .stations .count { color: var(--soft); font-size: 13.5px; white-space: nowrap; }
.regard .mark-of { margin-inline-start: auto; color: var(--soft); font-size: 14px; }
.regard .mark-of[data-agrees="no"] { color: var(--second); font-weight: 600; }

.regard .walk .cards { display: grid; gap: 14px; padding: 8px 0 26px; }
.regard .walk .step { background: var(--sheet); border: 1px solid var(--line); border-radius: 14px; padding: 16px clamp(14px, 2cqw, 24px) 12px; box-shadow: var(--shadow); min-width: 0; }
.regard .walk .step header { display: flex; gap: 14px; align-items: baseline; justify-content: space-between; }
.regard .walk .step h3 { font: 500 15.5px/1.4 var(--sans); }
.regard .walk .check { font-size: 13px; color: var(--soft); white-space: nowrap; }
.regard .walk .check[data-agrees="no"] { color: var(--second); font-weight: 600; }
.regard .walk .formula { font: italic 400 20px/1.5 var(--serif); margin: 2px 0 10px; overflow-wrap: anywhere; }
.regard .walk .of { font-size: 13.5px; color: var(--ink); margin-bottom: 5px; }
.regard .walk .of .width { color: var(--soft); }
.regard .walk .numbers-of { display: block; }
.regard .walk .row-of { display: flex; flex-wrap: wrap; gap: 4px; }
.regard .walk .cell { display: grid; justify-items: center; min-width: 74px; max-width: 130px; padding: 4px 7px; border: 1px solid var(--line); border-radius: 7px; font-size: 14px; line-height: 1.4; color: var(--ink); background: color-mix(in oklab, var(--first) var(--share), var(--sheet)); }
.regard .walk .cell[data-sign="minus"] { background: color-mix(in oklab, var(--second) var(--share), var(--sheet)); }
.regard .walk button.cell:hover { border-color: var(--soft); }
.regard .walk .cell[aria-pressed="true"] { border-color: var(--ink); box-shadow: inset 0 0 0 1px var(--ink); }
.regard .walk .cell .name { font: 400 14px/1.3 var(--serif); max-width: 100%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .walk .more { border: 0; background: none; color: var(--first); padding: 4px 6px; font-size: 13.5px; border-radius: 6px; }
.regard .walk .more:hover { background: var(--first-soft); }
.regard .walk .bars-of { display: grid; gap: 2px; max-width: 620px; }
.regard .walk .bar-of { display: grid; grid-template-columns: 8em minmax(0, 1fr) 4em; gap: 12px; align-items: center; padding: 3px 8px; margin-inline-start: -8px; border: 1px solid transparent; border-radius: 7px; background: none; font-size: 14px; text-align: start; }
.regard .walk .bar-of:hover { background: var(--hover); }
.regard .walk .bar-of[aria-pressed="true"] { background: var(--hover); }
.regard .walk .bar-of .name { font: 400 16px/1.3 var(--serif); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .walk .bar-of .track { height: 8px; border-radius: 4px; background: var(--line); overflow: hidden; }
.regard .walk .bar-of .bar { display: block; height: 100%; margin: 0; border-radius: 4px; background: var(--first); }
.regard .walk .bar-of .number { text-align: end; }
.regard .walk .making { margin-top: 10px; font-size: 14px; line-height: 1.75; color: var(--soft); overflow-wrap: anywhere; }
.regard .walk .making .left { font-style: italic; font-family: var(--serif); color: var(--ink); }
.regard .walk .making strong { color: var(--ink); font-weight: 600; }
.regard .walk .making .term { white-space: nowrap; }
.regard .walk .making .terms { display: inline; }
.regard .walk footer { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 12px; padding-top: 9px; border-top: 1px solid var(--line); font-size: 12.5px; color: var(--soft); }
.regard .walk code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.regard .walk .param i { font-family: var(--serif); font-size: 14px; }
.regard .walk .own { margin-inline-start: auto; }

@container regard (max-width: 789px) {
  .regard .follow { position: static; grid-template-columns: minmax(0, 1fr); }
  .regard .follow .choice { justify-items: start; }
  .regard .side-of { grid-template-columns: minmax(0, 1fr); gap: 2px; }
  .regard .side-name { text-align: start; }
  .regard .stations > li { padding-inline-start: 26px !important; }
  .regard .walk .own { margin-inline-start: 0; }
}
@media print { .regard .follow { position: static; } }
`;

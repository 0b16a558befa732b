/** How the search looks. */

export const DECODE_STYLE = `
.regard .decode .summary { color: var(--soft); font-size: 16px; max-width: 76ch; margin: 0 0 18px; }
.regard .decode .summary strong { color: var(--ink); font-weight: 600; }
.regard .decode-columns { display: grid; gap: 28px clamp(22px, 2.3cqw, 48px); grid-template-columns: minmax(0, 1fr); align-items: start; }
@container regard (min-width: 1020px) { .regard .decode-columns { grid-template-columns: minmax(0, 1fr) clamp(250px, 22cqw, 330px); } }
.regard .decode .sheet-of-paper { min-width: 0; }
.regard .decode .scroll-tree { overflow-x: auto; margin: 0 -8px; padding: 4px 8px 8px; border-radius: 10px; scroll-behavior: smooth; }
.regard .decode .scroll-tree:focus-visible { outline-offset: 0; }
.regard .decode .scroll-tree svg { display: block; user-select: none; max-width: none; }
.regard .tree .edge-of { fill: none; stroke: var(--soft); stroke-opacity: .42; stroke-linecap: round; }
.regard .tree .edge-of[data-state="best"] { stroke: var(--first); stroke-opacity: .8; }
.regard .tree .edge-of[data-state="pruned"] { stroke-opacity: .17; }
.regard .tree .edge-of[data-state="refused"] { stroke: var(--second); stroke-opacity: .34; stroke-dasharray: 2 4; }
.regard .tree .edge-of[data-lost] { stroke-opacity: .26; }
.regard .tree .edge-of.on { stroke: var(--first); stroke-opacity: 1; }
.regard .tree .item { cursor: pointer; }
.regard .tree .item rect { fill: var(--sheet); stroke: var(--line); stroke-width: 1.2; }
.regard .tree .item text { fill: var(--ink); }
.regard .tree .item[data-state="kept"] rect { fill: var(--hover); stroke: transparent; }
.regard .tree .item[data-lost] text { fill: var(--soft); }
.regard .tree .item[data-state="best"] rect { fill: var(--first-soft); stroke: var(--first); }
.regard .tree .item[data-state="best"] text { font-weight: 600; }
.regard .tree .item[data-state="finished"] rect { fill: var(--hover); stroke: var(--soft); }
.regard .tree .item[data-state="pruned"] rect, .regard .tree .item[data-state="refused"] rect { fill: transparent; stroke: transparent; }
.regard .tree .item[data-state="pruned"] text { fill: var(--soft); }
.regard .tree .item[data-state="refused"] text { fill: var(--second); text-decoration: line-through; }
.regard .tree .item:hover rect { stroke: var(--soft); }
.regard .tree .item.along rect { stroke: var(--first); }
.regard .tree .item.on rect { stroke: var(--first); stroke-width: 2.5; }
.regard .tree .item rect.flag { fill: var(--soft); stroke: var(--sheet); }
.regard .tree .item[data-state="best"] rect.flag { fill: var(--first); stroke: var(--sheet); stroke-width: 1.2; }
.regard .tree text.result { fill: var(--soft); pointer-events: none; paint-order: stroke; stroke: var(--sheet); stroke-width: 4px; stroke-linejoin: round; }
.regard .tree text.result[data-state="best"] { fill: var(--first); font-weight: 600; }
.regard .tree text.step-number { fill: var(--soft); }
.regard .tree text.step-number.forced { fill: var(--second); }
.regard .tree .begin { fill: var(--first); }
.regard .tree .parting { stroke: var(--line); stroke-dasharray: 2 5; }
.regard .decode .keys { display: flex; flex-wrap: wrap; gap: 6px 20px; margin-top: 14px; font-size: 13.5px; color: var(--soft); }
.regard .decode .keys > span { display: inline-flex; align-items: center; gap: 8px; }
.regard .decode .keys i { width: 18px; height: 12px; border-radius: 6px; border: 1.2px solid var(--line); background: var(--hover); }
.regard .decode .keys i[data-state="best"] { background: var(--first-soft); border-color: var(--first); }
.regard .decode .keys i[data-state="finished"] { border-color: var(--soft); position: relative; }
.regard .decode .keys i[data-state="finished"]::after { content: ""; position: absolute; right: -4px; top: 1.5px; width: 7px; height: 7px; border-radius: 2px; background: var(--soft); }
.regard .decode .keys i[data-state="pruned"] { background: none; border-style: dotted; border-color: var(--soft); }
.regard .decode .keys i[data-state="refused"] { background: none; border-style: dashed; border-color: var(--second); }

.regard .looked { margin-top: 22px; padding-top: 20px; border-top: 1px solid var(--line); }
.regard .looked h2 { font: 400 14.5px/1.4 var(--sans); color: var(--soft); margin-bottom: 10px; }
.regard .looked h2 strong { color: var(--ink); font-weight: 600; }
.regard .looked .words { font: 400 20px/1.9 var(--serif); display: flex; flex-wrap: wrap; gap: 6px 5px; list-style: none; max-height: 40vh; overflow-y: auto; padding: 2px; }
.regard .looked li { border-radius: 7px; padding: 0 9px; }
.regard .looked li.light { color: var(--light); }
.regard .looked li.dark { color: var(--dark); }
.regard .looked li.own { font-style: italic; }

.regard .node .text { font: 400 23px/1.35 var(--serif); overflow-wrap: anywhere; }
.regard .node .text .new { color: var(--first); font-weight: 600; }
.regard .node .fate { color: var(--soft); font-size: 15px; margin: 8px 0 14px; }
.regard .node .fate strong { color: var(--ink); font-weight: 600; }
.regard .node dl { display: grid; gap: 7px; }
.regard .node dl > div { display: flex; justify-content: space-between; gap: 16px; font-size: 15px; border-bottom: 1px solid var(--line); padding-bottom: 6px; }
.regard .node dt { color: var(--soft); }
.regard .node dd { font-weight: 600; }
.regard .outputs h2, .regard .constraints h2 { font: 500 14.5px/1.3 var(--sans); margin-bottom: 8px; }
.regard .outputs ol { list-style: none; display: grid; gap: 2px; margin: 0 -10px; }
.regard .outputs button { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 12px; width: 100%; align-items: baseline; text-align: start; border: 0; background: none; border-radius: 9px; padding: 6px 10px; font-size: 16px; }
.regard .outputs button:hover { background: var(--hover); }
.regard .outputs button[aria-pressed="true"] { background: var(--first-soft); }
.regard .outputs .score { color: var(--soft); font-size: 14px; }
.regard .outputs li:first-child .words { font-weight: 600; }
.regard .outputs .times { color: var(--soft); font-weight: 400; }
.regard .constraints ul { margin: 0; padding: 0; list-style: none; display: grid; gap: 6px; font-size: 15px; color: var(--soft); }
.regard .constraints bdi { color: var(--second); font-weight: 600; }
.regard .decode-table .scroll { overflow: auto; max-height: 70vh; border: 1px solid var(--line); border-radius: 10px; }
.regard .decode-table th, .regard .decode-table td { text-align: start; }
.regard .decode-table td.figure-of { text-align: end; }
.regard .decode-table tr[data-state="best"] td { font-weight: 600; }
.regard .decode-table tr[data-state="pruned"] td, .regard .decode-table tr[data-state="refused"] td { color: var(--soft); }
.regard .decode-table tr.on > * { background: var(--first-soft); }
.regard .decode-table tbody th { font-weight: 400; }
@media (forced-colors: active) { .regard .looked li { forced-color-adjust: none; } }
`;

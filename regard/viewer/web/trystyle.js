/** How *Try it* looks. */

export const TRYING_STYLE = `
.regard .trying { display: grid; gap: 28px clamp(22px, 2.3cqw, 48px); grid-template-columns: minmax(0, 1fr); align-items: start; }
@container regard (min-width: 790px) { .regard .trying { grid-template-columns: clamp(250px, 26cqw, 340px) minmax(0, 1fr); } }
.regard .trying h2, .regard .trying ul { margin: 0; padding: 0; font-weight: inherit; }
.regard .changes { display: grid; gap: 26px; min-width: 0; align-content: start; }
.regard .changes .group { display: grid; gap: 10px; min-width: 0; }
.regard .changes .group h2 { font: 400 20px/1.3 var(--serif); color: var(--soft); }
.regard .changes .where-to, .regard .changes .which { display: flex; flex-wrap: wrap; gap: 4px; align-items: baseline; margin-inline-start: -8px !important; }
.regard .changes .which span { color: var(--soft); }
.regard .switches { display: grid; justify-items: start; gap: 4px; margin-inline-start: -2px; }
.regard .toggle:disabled { opacity: .45; cursor: default; }
.regard .others { list-style: none; display: flex; flex-wrap: wrap; gap: 6px; }
.regard .others:empty { display: none; }
.regard .sliders { display: grid; gap: 3px; max-height: 46vh; overflow-y: auto; padding: 3px; margin: -3px; }
.regard .sliders:empty { display: none; }
.regard .sliders label { display: grid; grid-template-columns: minmax(0, 6.4em) 1fr 3.2em; gap: 10px; align-items: center; font-size: 15px; }
.regard .sliders .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .sliders input { width: 100%; min-width: 0; accent-color: var(--first); margin: 0; }
.regard .sliders output { text-align: end; color: var(--soft); font-size: 14px; }
.regard .changes .sum { color: var(--soft); font-size: 14px; }
.regard .changes .buttons { display: flex; flex-wrap: wrap; gap: 8px; }
.regard .changes label.text { display: grid; gap: 4px; font-size: 14px; color: var(--soft); }
.regard .changes textarea { font: 400 17px/1.4 var(--serif); color: var(--ink); background: var(--sheet); border: 1px solid var(--soft); border-radius: 8px; padding: 6px 10px; width: 100%; resize: vertical; field-sizing: content; }
.regard .changes code { font-size: 13.5px; color: var(--ink); background: var(--hover); border-radius: 5px; padding: 1px 5px; overflow-wrap: anywhere; }
.regard .changes .note { margin-top: 0 !important; }
.regard .results { display: grid; gap: 28px; min-width: 0; }
.regard .refused { border-inline-start: 3px solid var(--second); padding: 4px 14px !important; }
.regard .trying[data-asking] .outcomes, .regard .trying[data-asking] .panels { opacity: .55; }
.regard .panels.two, .regard .outcomes { display: grid; gap: 28px 36px; grid-template-columns: minmax(0, 1fr); }
@container regard (min-width: 1020px) { .regard .panels.two, .regard .outcomes { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.regard .trying .panel h2, .regard .outcome h2 { font: 500 15px/1.3 var(--sans); margin: 0 0 10px; color: var(--first); }
.regard .trying .panel:nth-child(2) h2, .regard .outcome:nth-child(2) h2 { color: var(--second); }
.regard .trying .panel h2 { display: block; }
.regard .outcomes { margin-bottom: 30px; padding-bottom: 26px; border-bottom: 1px solid var(--line); }
.regard .outcome { min-width: 0; }
.regard .said { font: 400 clamp(19px, 1.9cqw, 24px)/1.35 var(--serif); overflow-wrap: anywhere; }
.regard .outcome .score { color: var(--soft); font-size: 14px; margin: 4px 0 12px !important; }
.regard .steps { list-style: none; display: grid; gap: 3px; max-height: 46vh; overflow-y: auto; }
.regard .steps li { display: grid; grid-template-columns: minmax(0, 7em) 3.4em minmax(0, 1fr); gap: 10px; align-items: baseline; font-size: 15px; padding: 1px 6px; border-radius: 6px; border-inline-start: 3px solid transparent; }
.regard .steps .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .steps .weight { text-align: end; }
.regard .steps .rest { font-size: 13.5px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.regard .steps .differs { border-inline-start-color: var(--second); background: var(--second-soft); }
.regard .steps .differs .name { font-weight: 650; }
.regard .steps .differs .rest { color: var(--ink); }
.regard .most .quiet { font: 400 20px/1.3 var(--serif); color: var(--soft); margin-bottom: 8px; }
.regard .most .ranks.pairs li { grid-template-columns: minmax(0, 1fr) 9em; max-width: 460px; }
`;

const name = "verdicts " + (pairs[0] ? pairs[0].pair : "") + pairs.length;
const verdicts = JSON.parse(localStorage.getItem(name) || "{}");
let at = Math.max(0, pairs.findIndex(pair => !(pair.pair in verdicts)));
const find = id => document.getElementById(id);
function show() {
  const pair = pairs[at];
  find("prompt").textContent = pair.prompt;
  find("left-text").textContent = pair.left || "(empty)";
  find("right-text").textContent = pair.right || "(empty)";
  for (const side of ["left", "tie", "right"]) find(side).setAttribute("aria-pressed", verdicts[pair.pair] === side);
  find("done").textContent = Object.keys(verdicts).length;
  find("end").hidden = Object.keys(verdicts).length < pairs.length;
}
function move(by) { at = Math.min(pairs.length - 1, Math.max(0, at + by)); show(); }
function judge(side) {
  verdicts[pairs[at].pair] = side;
  localStorage.setItem(name, JSON.stringify(verdicts));
  move(1);
}
function save() {
  const lines = Object.entries(verdicts).map(([pair, better]) => JSON.stringify({pair, better, drawn}) + "\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines, {type: "application/jsonl"}));
  link.download = "verdicts.jsonl";
  link.click();
}
for (const side of ["left", "tie", "right"]) find(side).onclick = () => judge(side);
find("back").onclick = () => move(-1);
find("next").onclick = () => move(1);
find("save").onclick = save;
document.onkeydown = event => {
  const act = {1: () => judge("left"), 2: () => judge("tie"), 3: () => judge("right"),
               ArrowLeft: () => move(-1), ArrowRight: () => move(1)}[event.key];
  if (act) act();
};
if (pairs.length) show();

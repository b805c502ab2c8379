// One round with a draft tree, step by step: propose, mask, verify, accept, commit.
// draft_tree(element, {tokens, parents, ids, choices, choice_ids, length, title}): for each node its text, parent (-1 at
// the root), token id, and text and id of the target's choice after it; length: committed slots of the cache.
function draft_tree(place, { tokens, parents, ids, choices, choice_ids: choiceIds, length, title }) {
  place.innerHTML = `<style>
  .e3-draft_tree { color-scheme: light dark; --ink: light-dark(#1f2328, #e6edf3); --faint: light-dark(#d0d7de, #3d444d);
    --paper: light-dark(#fff, #161b22); --accepted: light-dark(#1f8a64, #3fb98b); --rejected: light-dark(#b84a80, #e08ab5);
    --corrected: light-dark(#b9591c, #f0a06a); --bonus: light-dark(#2f6fae, #6cb0f0); --quiet: light-dark(#6b7280, #9aa4af);
    background: var(--paper); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; padding: .8em; border-radius: 6px;
    max-width: 760px; box-sizing: border-box }
  [data-theme="light"] .e3-draft_tree, [data-jp-theme-light="true"] .e3-draft_tree { color-scheme: light }
  [data-theme="dark"] .e3-draft_tree, [data-jp-theme-light="false"] .e3-draft_tree { color-scheme: dark }
  .e3-draft_tree nav { display: flex; gap: .6em; align-items: center; margin: .5em 0 }
  .e3-draft_tree nav input { flex: 1; min-width: 0 }
  .e3-draft_tree button { font: inherit; color: inherit; background: none; border: 1px solid var(--faint); border-radius: 4px;
    padding: .1em .6em; cursor: pointer }
  .e3-draft_tree button:disabled { opacity: .4 }
  .e3-draft_tree .caption { min-height: 4.2em; margin: .2em 0 }
  .e3-draft_tree svg { display: block; width: 100%; max-width: none; overflow: visible }
  .e3-draft_tree text { fill: var(--ink); font: 12px ui-monospace, monospace }
  .e3-draft_tree text.small { font-size: 10px } .e3-draft_tree text.head { font: 12px system-ui, sans-serif }
  </style><div class="e3-draft_tree" role="group"><b></b>
  <nav><button type="button" name="back">Back</button><input type="range" name="step" min="0" step="1" value="0"
    aria-label="step"><button type="button" name="next">Next</button></nav>
  <p class="caption" aria-live="polite"></p><svg role="img"></svg></div>`;

  const root = place.querySelector(".e3-draft_tree");
  const svg = root.querySelector("svg");
  const slider = root.querySelector("input");
  root.querySelector("b").textContent = title || "";
  root.setAttribute("aria-label", title || "one round with a draft tree");

  const count = parents.length;
  const nodes = parents.map((_, node) => node);
  const children = nodes.map(node => nodes.filter(child => parents[child] === node));
  const level = nodes.map(() => 0);
  for (const node of nodes) if (parents[node] >= 0) level[node] = level[parents[node]] + 1;
  const depth = Math.max(...level);
  const sees = nodes.map(() => nodes.map(() => false));
  for (const node of nodes) for (let other = node; other >= 0; other = parents[other]) sees[node][other] = true;

  // The walk of verification: at each node, the children that were tried, and the accepted child if there is one.
  const walk = [];
  for (let node = 0; node !== undefined; node = walk.at(-1).accepted) {
    const accepted = children[node].find(child => ids[child] === choiceIds[node]);
    const tried = children[node].filter(child => accepted === undefined || child <= accepted);
    walk.push({ node, tried, accepted });
  }
  const path = [0, ...walk.map(visit => visit.accepted).filter(node => node !== undefined)];
  const ending = path.at(-1);
  const added = children[ending].length ? "corrected" : "bonus";
  const shown = text => `“${(text.trim() || text).replaceAll("\n", "⏎")}”`;

  // Places: a row for each leaf, a column for each level.
  const row = nodes.map(() => 0);
  let leaves = 0;
  (function visit(node) {
    row[node] = leaves;
    children[node].forEach(visit);
    if (!children[node].length) leaves++;
  })(0);

  const steps = [{ name: "start", caption: `The text ends with ${shown(tokens[0])}, the root of the tree. The target has chosen
    it, but has not processed it yet.` }];
  for (let line = 1; line <= depth; line++) {
    const size = level.filter(value => value === line).length;
    steps.push({ name: "propose", level: line, caption: `Propose. The head runs on level ${line - 1} and proposes level ${line}.
      ${size} ${size === 1 ? "node is" : "nodes are"} likely enough to be kept.` });
  }
  steps.push({ name: "mask", caption: `Mask. The target processes all ${count} nodes in one pass. In the grid, each row is a node.
    It attends to the text, to its ancestors and to itself, and not to its siblings.` });
  steps.push({ name: "verify", caption: `Verify. The pass gives the target's choice after every node, written below the node.` });
  walk.forEach((visit, index) => {
    const start = `Accept. After ${shown(tokens[visit.node])} the target chooses ${shown(choices[visit.node])}.`;
    const result = visit.accepted !== undefined ? "A child has this token, so it is accepted." : added === "bonus"
      ? "This node has no children, so the round adds the choice as a bonus."
      : "No child has this token, so the round adds it as a correction.";
    steps.push({ name: "accept", visits: index + 1, caption: `${start} ${result}` });
  });
  steps.push({ name: "commit", caption: `Commit. Nodes are in the slots of the cache in the order of their numbers. The accepted
    path moves to the front, and the length grows by ${path.length}. Later slots are ignored. The next root is
    ${shown(choices[ending])}: the round has added ${path.length} ${path.length === 1 ? "token" : "tokens"}.` });
  slider.max = steps.length - 1;

  function add(parent, name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  }

  function statusOf(node, visits) {
    if (node === 0) return "root";
    for (const visit of walk.slice(0, visits)) {
      if (visit.accepted === node) return "accepted";
      if (visit.tried.includes(node)) return "rejected";
    }
    return visits === walk.length ? "never visited" : "drafted";
  }

  function draw() {
    const index = Number(slider.value);
    const step = steps[index];
    const at = name => steps.findIndex(other => other.name === name);
    const visits = step.name === "accept" ? step.visits : index > at("accept") ? walk.length : 0;
    const lastLevel = step.name === "start" ? 0 : step.name === "propose" ? step.level : depth;
    root.querySelector(".caption").textContent = `${index + 1} / ${steps.length}. ${step.caption}`;
    root.querySelector("[name=back]").disabled = index === 0;
    root.querySelector("[name=next]").disabled = index === steps.length - 1;
    root.dataset.step = step.name;

    const width = svg.clientWidth || 700, column = (width - 20) / (depth + 1), line = 38;
    const x = node => 12 + column * level[node], y = node => 16 + line * row[node];
    const room = Math.max(Math.floor((column - 26) / 7.3), 3);
    const cut = text => text.length > room ? text.slice(0, room - 1) + "…" : text;
    const visible = text => cut(text.trim() ? text.replaceAll("\n", "⏎") : text.replaceAll(" ", "␣").replaceAll("\n", "⏎"));
    const color = { accepted: "var(--accepted)", rejected: "var(--rejected)", "never visited": "var(--quiet)",
      drafted: "var(--ink)", root: "var(--ink)" };
    svg.replaceChildren();
    add(svg, "title", {}, step.caption);
    const status = nodes.map(node => statusOf(node, visits));
    for (const node of nodes) {
      if (level[node] > lastLevel || node === 0) continue;
      const parent = parents[node];
      add(svg, "path", { d: `M${x(parent)},${y(parent)} V${y(node)} H${x(node)}`, fill: "none",
        stroke: color[status[node]], "stroke-width": status[node] === "accepted" ? 3 : 1,
        opacity: status[node] === "never visited" ? 0.5 : 1 });
    }
    for (const node of nodes) {
      if (level[node] > lastLevel) continue;
      const g = add(svg, "g", { "data-node": node, "data-status": status[node], opacity: status[node] === "never visited" ? 0.55 : 1 });
      add(g, "title", {}, `node ${node}, ${status[node]}: ${tokens[node]}`);
      add(g, "circle", { cx: x(node), cy: y(node), r: 9, fill: "var(--paper)", stroke: color[status[node]],
        "stroke-width": status[node] === "accepted" ? 3 : 1.5,
        ...(status[node] === "rejected" ? { "stroke-dasharray": "3 2" } : {}) });
      add(g, "text", { class: "small", x: x(node), y: y(node) + 3.5, "text-anchor": "middle" }, node);
      add(g, "text", { x: x(node) + 13, y: y(node) - 3 }, visible(tokens[node]));
      if (index >= at("verify")) {
        const next = add(g, "text", { class: "small", x: x(node) + 13, y: y(node) + 13, "data-choice": choices[node] },
          "→" + visible(choices[node]));
        const decided = walk.slice(0, visits).some(visit => visit.node === node);
        next.style.fill = decided ? (node === ending ? `var(--${added})` : "var(--accepted)") : "var(--quiet)";
        if (decided) next.style.fontWeight = "bold";
      }
    }
    let below = 16 + line * leaves;
    if (step.name === "mask") below = drawMask(below, width);
    if (step.name === "commit") below = drawSlots(below, width);
    svg.setAttribute("viewBox", `0 0 ${width} ${below}`);
    svg.style.height = `${below}px`;
  }

  function drawMask(top, width) {
    const cell = Math.min(18, (width - 30) / count);
    for (const node of nodes) {
      add(svg, "text", { class: "small", x: 16, y: top + 22 + cell * (node + 0.75), "text-anchor": "end" }, node);
      add(svg, "text", { class: "small", x: 22 + cell * (node + 0.5), y: top + 16, "text-anchor": "middle" }, node);
      for (const other of nodes) {
        add(svg, "rect", { "data-row": node, "data-column": other, "data-seen": sees[node][other], x: 22 + cell * other,
          y: top + 21 + cell * node, width: cell - 1, height: cell - 1,
          fill: sees[node][other] ? "var(--bonus)" : "var(--faint)", opacity: sees[node][other] ? 1 : 0.45 });
      }
    }
    return top + 26 + cell * count;
  }

  function drawSlots(top, width) {
    const cell = Math.min(30, (width - 12) / (count + 1));
    const lines = [["slots of the cache after the pass", nodes], [`after the commit: length ${length + path.length}`, nodes.map(slot => path[slot])]];
    lines.forEach(([words, held], index) => {
      const y = top + 18 + 62 * index;
      add(svg, "text", { class: "head", x: 2, y: y - 4 }, words);
      held.forEach((node, slot) => {
        const g = add(svg, "g", { "data-line": index, "data-slot": length + slot, "data-holds": node ?? "" });
        const kept = node !== undefined && path.includes(node);
        add(g, "rect", { x: 2 + cell * slot, y, width: cell - 2, height: 24, rx: 2, fill: kept ? "var(--accepted)" : "var(--faint)",
          opacity: kept ? 0.35 : 0.5 });
        if (node !== undefined) add(g, "text", { x: 1 + cell * (slot + 0.5), y: y + 16, "text-anchor": "middle" }, node);
        if (slot % (cell < 24 ? 4 : 2) === 0) {
          add(g, "text", { class: "small", x: 1 + cell * (slot + 0.5), y: y + 36, "text-anchor": "middle" }, length + slot);
        }
      });
    });
    const end = 1 + cell * path.length;
    add(svg, "line", { x1: end, x2: end, y1: top + 78, y2: top + 108, stroke: "var(--ink)", "stroke-width": 2 });
    return top + 122;
  }

  slider.addEventListener("input", draw);
  root.querySelector("[name=back]").addEventListener("click", () => { slider.value = Number(slider.value) - 1; draw(); });
  root.querySelector("[name=next]").addEventListener("click", () => { slider.value = Number(slider.value) + 1; draw(); });
  new ResizeObserver(draw).observe(root);
  draw();
}

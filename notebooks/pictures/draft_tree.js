// One round with a draft tree, step by step: propose, mask, verify, accept, commit.
// draft_tree(element, {tokens, parents, ids, choices, choice_ids, length, title}): for each node its text, parent (-1 at
// the root), token id, and text and id of the target's choice after it; length: committed slots of the cache.
function draft_tree(place, { tokens, parents, ids, choices, choice_ids: choiceIds, length, title }) {
  const count = parents.length;
  const nodes = parents.map((_, node) => node);
  const children = nodes.map(node => nodes.filter(child => parents[child] === node));
  const { places, depth } = placesOf(parents);
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
  const added = addedKind(parents, path);
  const shown = text => `“${(text.trim() || text).replaceAll("\n", "⏎")}”`;

  const steps = [{ name: "start", caption: `The text ends with ${shown(tokens[0])}, the root of the tree. The target has chosen
    it, but has not processed it yet.` }];
  for (let line = 1; line <= depth; line++) {
    const size = places.filter(({ depth }) => depth === line).length;
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

  function kindOf(node, visits) {
    if (node === 0) return "root";
    for (const visit of walk.slice(0, visits)) {
      if (visit.accepted === node) return "accepted";
      if (visit.tried.includes(node)) return "rejected";
    }
    return visits === walk.length ? "never visited" : "drafted";
  }

  function draw(root, index) {
    const step = steps[index];
    const at = name => steps.findIndex(other => other.name === name);
    const visits = step.name === "accept" ? step.visits : index > at("accept") ? walk.length : 0;
    const lastLevel = step.name === "start" ? 0 : step.name === "propose" ? step.level : depth;
    root.querySelector(".caption").textContent = `${index + 1} / ${steps.length}. ${step.caption}`;
    root.dataset.step = step.name;

    const below = root.querySelector(".drawing");
    const width = Math.min((root.clientWidth || 700) - 24, 740);  // a picture that is not shown has no width
    const kinds = nodes.map(node => kindOf(node, visits));
    const picture = drawTree({ parents, kinds, texts: tokens, lastLevel, isNumbered: true, column: (width - 12) / (depth + 1),
      titles: nodes.map(node => `node ${node}, ${kinds[node]}: ${tokens[node]}`),
      notes: index < at("verify") ? [] : choices.map(choice => `→${choice}`) });
    for (const { node } of walk.slice(0, visits)) {
      const choice = picture.querySelector(`[data-node="${node}"] .below`);
      choice.style.cssText = `font-weight: bold; fill: ${INK[node === ending ? added : "accepted"]}`;
    }
    root.querySelector(".tree").replaceChildren(picture);
    below.replaceChildren();
    const height = step.name === "mask" ? drawMask(below, width) : step.name === "commit" ? drawSlots(below, width) : 0;
    below.setAttribute("viewBox", `0 0 ${width} ${height}`);
    below.setAttribute("width", width);
    below.setAttribute("height", height);
  }

  function add(parent, tag, attributes, text) {
    return parent.appendChild(shape(tag, attributes, text));
  }

  function drawMask(below, width) {
    const cell = Math.min(18, (width - 30) / count);
    for (const node of nodes) {
      add(below, "text", { class: "note", x: 16, y: 22 + cell * (node + 0.75), "text-anchor": "end" }, node);
      add(below, "text", { class: "note", x: 22 + cell * (node + 0.5), y: 16, "text-anchor": "middle" }, node);
      for (const other of nodes) {
        add(below, "rect", { "data-row": node, "data-column": other, "data-seen": sees[node][other], x: 22 + cell * other,
          y: 21 + cell * node, width: cell - 1, height: cell - 1,
          fill: sees[node][other] ? "var(--bonus)" : "var(--line)", opacity: sees[node][other] ? 1 : 0.45 });
      }
    }
    return 26 + cell * count;
  }

  function drawSlots(below, width) {
    const cell = Math.min(30, (width - 12) / (count + 1));
    const lines = [["slots of the cache after the pass", nodes], [`after the commit: length ${length + path.length}`, nodes.map(slot => path[slot])]];
    lines.forEach(([words, held], index) => {
      const y = 18 + 62 * index;
      add(below, "text", { class: "words", x: 2, y: y - 4 }, words);
      held.forEach((node, slot) => {
        const g = add(below, "g", { "data-line": index, "data-slot": length + slot, "data-holds": node ?? "" });
        const kept = node !== undefined && path.includes(node);
        add(g, "rect", { x: 2 + cell * slot, y, width: cell - 2, height: 24, rx: 2, fill: kept ? "var(--accepted)" : "var(--line)",
          opacity: kept ? 0.35 : 0.5 });
        if (node !== undefined) add(g, "text", { x: 1 + cell * (slot + 0.5), y: y + 16, "text-anchor": "middle" }, node);
        if (slot % (cell < 24 ? 4 : 2) === 0) {
          add(g, "text", { class: "note", x: 1 + cell * (slot + 0.5), y: y + 36, "text-anchor": "middle" }, length + slot);
        }
      });
    });
    const end = 1 + cell * path.length;
    add(below, "line", { x1: end, x2: end, y1: 78, y2: 108, stroke: "var(--ink)", "stroke-width": 2 });
    return 122;
  }

  framed(place, { name: "draft_tree", title: title || "One round with a draft tree", last: steps.length - 1, draw,
    content: `<div class="tree"></div><svg class="drawing" role="img"></svg>` });
}

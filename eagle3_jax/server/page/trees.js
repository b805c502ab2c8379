// Draws draft trees: on the page of the server, in the notebooks and on the site. The page around a picture defines the
// colors --bg, --ink, --muted, --accepted, --rejected, --corrected, --bonus and --unvisited.

const INK = {
  root: "var(--ink)", drafted: "var(--ink)", accepted: "var(--accepted)", rejected: "var(--rejected)",
  corrected: "var(--corrected)", bonus: "var(--bonus)", "never visited": "var(--unvisited)",
};

// The kind of the token that the target adds after a path of accepted nodes.
const addedKind = (parents, path) => parents.includes(path.at(-1) ?? 0) ? "corrected" : "bonus";

// The kind of each node. Verification tries the children of a node in order: those before the accepted one are rejected.
function nodeKinds(parents, path) {
  const taken = new Map();
  [0, ...path].forEach((node, index) => taken.set(node, path[index] ?? Infinity));
  return parents.map((parent, node) => {
    if (parent < 0) return "root";
    const child = taken.has(parent) ? taken.get(parent) : -1;
    return node === child ? "accepted" : node < child ? "rejected" : "never visited";
  });
}

// Columns are depths; each leaf has a row, and a parent has the row of its first child.
function placesOf(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
  const places = [];
  let rows = 0;
  const visit = (node, depth) => {
    places[node] = { depth, row: rows };
    if (!children[node].length) rows += 1;
    children[node].forEach((child) => visit(child, depth + 1));
  };
  visit(0, 0);
  return { places, rows, depth: Math.max(...places.map((place) => place.depth)) };
}

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  if (text !== undefined) element.textContent = text;
  return element;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
function short(text, room = 13) {
  const shown = visible(text);
  return shown.length > room ? `${shown.slice(0, room - 1)}…` : shown;
}

// A mark for each kind, so that color is not the only one.
function mark(kind, x, y) {
  const ink = INK[kind];
  const filled = { fill: ink, stroke: ink };
  if (kind === "root") return shape("rect", { x: x - 5, y: y - 5, width: 10, height: 10, ...filled });
  if (kind === "rejected") return shape("path", { d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, stroke: ink, "stroke-width": 3, fill: "none" });
  if (kind === "corrected") return shape("path", { d: `M${x} ${y - 7}l7 7l-7 7l-7 -7z`, ...filled });
  if (kind === "bonus") {
    const points = Array.from({ length: 10 }, (_, index) => {
      const radius = index % 2 ? 3.4 : 8;
      const angle = (index * Math.PI) / 5;
      return `${x + radius * Math.sin(angle)},${y - radius * Math.cos(angle)}`;
    });
    return shape("polygon", { points: points.join(" "), ...filled });
  }
  const isOpen = kind === "never visited" || kind === "drafted";
  return shape("circle", { cx: x, cy: y, r: 5, fill: isOpen ? "var(--bg)" : ink, stroke: ink, "stroke-width": 1.5 });
}

// A node as a circle with its number, for pictures that name nodes.
function numberMark(kind, x, y, node) {
  const ring = { cx: x, cy: y, r: 9, fill: "var(--bg)", stroke: INK[kind], "stroke-width": kind === "accepted" ? 3 : 1.5 };
  if (kind === "rejected") ring["stroke-dasharray"] = "3 2";
  const group = shape("g", {});
  group.append(shape("circle", ring), shape("text", { class: "note", x, y: y + 3.5, "text-anchor": "middle" }, node));
  return group;
}

// The width of a level with which a tree fills its place, and no more.
function columnFor(parents, place) {
  const levels = placesOf(parents).depth + 1;
  return Math.max(46, Math.min(112, Math.floor((place.clientWidth - 12) / levels)));
}

// A tree as SVG, from left to right. Of each node: its parent (-1 at the root), kind, text, title (shown on hover) and
// note (below the text, or null). `column` is the width of a level; levels after `lastLevel` have room, but are not drawn.
function drawTree({ parents, kinds, texts, titles, notes = [], column = 112, lastLevel = Infinity, isNumbered = false }) {
  const { places, rows, depth } = placesOf(parents);
  const [line, left, top] = [40, 12, 24];
  const width = left + column * (depth + 1);
  const height = top + line * rows;
  const room = Math.max(Math.floor((column - 15) / 7.5), 3);
  const picture = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const at = (node) => [left + column * places[node].depth, top + line * places[node].row];
  const shown = parents.map((_, node) => node).filter((node) => places[node].depth <= lastLevel);
  for (const node of shown.filter((node) => parents[node] >= 0)) {
    const [x0, y0] = at(parents[node]);
    const [x1, y1] = at(node);
    const bend = y0 === y1 ? "" : `C${x0 + 0.36 * column} ${y0} ${x0 + 0.23 * column} ${y1} ${x0 + 0.52 * column} ${y1}`;
    const isAdded = ["accepted", "corrected", "bonus"].includes(kinds[node]);
    picture.append(shape("path", { d: `M${x0} ${y0}${bend}L${x1} ${y1}`, fill: "none", stroke: INK[kinds[node]], "stroke-width": isAdded ? 2.4 : 1 }));
  }
  for (const node of shown) {
    const [x, y] = at(node);
    const group = shape("g", { class: "node", "data-node": node, "data-kind": kinds[node] });
    group.append(shape("title", {}, titles[node]));
    group.append(shape("rect", { x: x - 8, y: y - 22, width: column - 6, height: line - 4, fill: "transparent" }));
    group.append(shape("circle", { class: "ring", cx: x, cy: y, r: 11, fill: "none" }));
    group.append(isNumbered ? numberMark(kinds[node], x, y, node) : mark(kinds[node], x, y));
    group.append(shape("text", { x: x + (isNumbered ? 12 : 9), y: y - 7 }, short(texts[node], room)));
    if (notes[node] != null) group.append(shape("text", { class: "note below", x: x + (isNumbered ? 12 : 9), y: y + 15 }, short(notes[node], room)));
    picture.append(group);
  }
  return picture;
}

// The kinds of a tree with their marks.
function treeLegend(kinds) {
  return [...new Set(kinds)].map((kind) => {
    const key = document.createElement("span");
    key.className = "key";
    const icon = shape("svg", { width: 18, height: 18, "aria-hidden": true });
    icon.append(mark(kind, 9, 9));
    key.append(icon, kind === "root" ? "last token before the round" : kind);
    return key;
  });
}

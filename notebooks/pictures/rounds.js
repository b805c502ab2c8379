// Recorded rounds as draft trees, with a slider.
// rounds(element, {title, rounds: [{tokens, parents, kinds, p, q, score, title}, ...]}): for each node its text, parent (-1 at
// the root) and kind; p and q, its probabilities after its parent, and score, the sum of ln q, are numbers or null.
function rounds(place, { title, rounds: recorded }) {
  const value = (name, number, digits) => number == null ? [] : [`${name} ${number.toFixed(digits)}`];

  function describe({ tokens, kinds, p, q, score }, node) {
    return [`“${visible(tokens[node])}”: node ${node}, ${kinds[node]}`, ...value("p (target)", p?.[node], 4),
      ...value("q (drafter)", q?.[node], 4), ...value("sum of ln q", score?.[node], 3)].join(", ");
  }

  function draw(root, index) {
    const round = recorded[index];
    const titles = round.tokens.map((_, node) => describe(round, node));
    const caption = root.querySelector(".caption");
    root.querySelector(".tree").replaceChildren(drawTree({ ...round, texts: round.tokens, titles }));
    root.querySelector(".legend").replaceChildren(...treeLegend(round.kinds));
    caption.textContent = `${index + 1} / ${recorded.length}. ${round.title}. Point at a token for its values.`;
    for (const group of root.querySelectorAll(".node")) {
      group.addEventListener("pointerenter", () => { caption.textContent = titles[group.dataset.node]; });
    }
  }

  framed(place, { name: "rounds", title, last: recorded.length - 1, draw,
    content: `<div class="scroll tree"></div><p class="legend"></p>` });
}

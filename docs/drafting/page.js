// The page: reads the controls, asks rounds.js, and draws. The pictures of drafts are those of trees.js.

const TASKS = { mt_bench: "chat (MT-bench)", humaneval: "code (HumanEval)", gsm8k: "maths (GSM8K)" };
const SECONDS_PER_STEP = 0.12; // of the animation
const SHOWN_BARS = 8;

const root = document.querySelector(".e3-drafting");
const record = JSON.parse(document.querySelector("#drafting-record").textContent);
const one = (selector) => root.querySelector(selector);
const all = (selector) => [...root.querySelectorAll(selector)];
const field = (name) => one(`[name="${name}"]`);
const checked = (name) => one(`[name="${name}"]:checked`).value === "yes";
const say = (name, text) => all(`output[name="${name}"]`).forEach((output) => { output.textContent = text; });
const percent = (share) => share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
const pieceOf = (token) => record.pieces[token];

function element(tag, className, text) {
  const created = document.createElement(tag);
  if (className) created.className = className;
  if (text !== undefined) created.textContent = text;
  return created;
}

// Makes an element that is no button act like one, for the mouse and the keyboard.
function asButton(target, act) {
  target.setAttribute("role", "button");
  target.setAttribute("tabindex", "0");
  target.addEventListener("click", act);
  target.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
  return target;
}

// What the reader has chosen, and what follows from it.
let settings; // of rounds.js, with the costs
let draw = 0; // number of the random course of the rounds
let shownText = []; // the positions of the text in the lanes
let rounds = []; // of that text
let chosenRound = null; // null: one that shows most
let clock = Infinity; // in plain steps; at rest the end
let running = null; // time of the last frame of the animation

// ---------------------------------------------------------------- texts

// For each temperature, a promise of the positions of all texts.
const loaded = new Map();

function textsAt(temperature) {
  if (!loaded.has(temperature)) {
    const index = record.temperatures.indexOf(temperature);
    const positions = record.prompts.map(({ texts }) => positionsOf(texts[index], record.steps));
    loaded.set(temperature, Promise.all(positions));
  }
  return loaded.get(temperature);
}

const tokensOf = (prompt) => record.prompts[prompt].texts[record.temperatures.indexOf(settings.temperature)].tokens;

// The part of texts that averages are over, which has the same length at every temperature.
function compared(texts, task) {
  return texts.filter((_, index) => task === "all" || record.prompts[index].task === task)
    .map((positions) => positions.slice(0, record.compared));
}

// ---------------------------------------------------------------- controls

function readSettings() {
  return {
    length: Number(field("length").value),
    temperature: Number(field("temperature").value),
    isSampled: checked("sampled"),
    isPerfect: checked("perfect"),
    verification: Number(field("v").value),
    draftStep: Number(field("c").value),
    task: field("task").value,
    prompt: Number(field("prompt").value),
  };
}

const machine = () => record.machines[field("machine").value];

// The costs of a measured machine depend on the draft length. Moving a cost chooses no machine.
function takeMeasuredCosts() {
  if (!machine()) return;
  field("v").value = machine().verification[field("length").value - 1];
  field("c").value = machine().draftStep;
}

function costsAt(length) {
  const verification = machine() ? machine().verification[length - 1] : settings.verification;
  return { ...settings, length, verification };
}

const speedupOf = (tau, costs) => tau / roundCost(costs);

// ---------------------------------------------------------------- results

let updates = 0; // so that an update that waited for texts does not overwrite a later one

async function update() {
  const number = ++updates;
  const wanted = readSettings();
  const texts = await textsAt(wanted.temperature);
  if (number !== updates) return;
  settings = wanted;
  const ownTexts = compared(texts, settings.task);
  const average = averageRounds(ownTexts, settings);
  showResult(average);
  showDepths(average.shares);
  showLengths(ownTexts);
  showLanes(texts[settings.prompt]);
  answerCosts(average.tau);
  answerPerfectHead(ownTexts);
  root.dataset.state = "shown";

  const [cold, warm] = await Promise.all([textsAt(0), textsAt(1)]);
  if (number === updates) answerTemperature(cold, warm);
}

function showResult({ tau }) {
  const { length, verification, draftStep, temperature } = settings;
  const speedup = speedupOf(tau, settings);
  say("speedup", speedup.toFixed(2));
  say("tau", tau.toFixed(2));
  say("length-used", length);
  say("length-shown", length);
  say("temperature-shown", temperature);
  for (const name of ["v-used", "v-shown"]) say(name, verification.toFixed(2));
  for (const name of ["c-used", "c-shown"]) say(name, draftStep.toFixed(3));
  const cost = roundCost(settings).toFixed(2);
  one(".verdict").textContent = speedup > 1
    ? `Drafting pays off: a round writes ${tau.toFixed(2)} tokens and takes as long as ${cost} plain steps.`
    : `Drafting does not pay off: a round writes ${tau.toFixed(2)} tokens, but takes as long as ${cost} plain steps.`;
  one(".measured").textContent = measuredWords();
}

// The measured speed-up of the machine next to what the formula gives for it.
function measuredWords() {
  if (!machine()) return "Costs of your own: moved by hand.";
  const { about, prompts, measured } = machine();
  const run = measured[settings.length - 1];
  if (!run) return about;
  const { speedup, tau } = run;
  return `${about} Measured on ${prompts}: drafts of ${settings.length} made greedy decoding ${speedup.toFixed(2)}× as fast, ` +
    `with ${tau.toFixed(2)} tokens per round. The formula gives ${speedupOf(tau, settings).toFixed(2)}× for them.`;
}

function barRow(label, share, value, isChosen = false) {
  const bar = element("span", isChosen ? "bar chosen" : "bar");
  const filled = element("i");
  filled.style.width = `${100 * Math.min(share, 1)}%`;
  bar.append(filled);
  return [element("span", "", label), bar, element("output", "", value)];
}

function showDepths(shares) {
  const rows = shares.flatMap((share, index) =>
    barRow(`${index + 1} ${index ? "guesses" : "guess"}`, share, percent(share)));
  one(".depths").replaceChildren(...rows);
}

function showLengths(texts) {
  const lengths = Array.from({ length: record.steps }, (_, index) => index + 1);
  const speedups = lengths.map((length) => speedupOf(averageRounds(texts, costsAt(length)).tau, costsAt(length)));
  const most = Math.max(...speedups, 1.5);
  const rows = lengths.flatMap((length, index) =>
    barRow(`K = ${length}`, speedups[index] / most, `${speedups[index].toFixed(2)}×`, length === settings.length));
  one(".lengths").replaceChildren(...rows);
  one(".lengths").style.setProperty("--plain", `${100 - 100 / most}%`);
  answer("length", lengthWords(lengths[likeliest(speedups)], Math.max(...speedups)));
}

// ---------------------------------------------------------------- answers to the questions of the controls

const answer = (name, words) => { one(`[data-answer=${name}]`).textContent = words; };

function lengthWords(best, speedup) {
  const fastest = `K = ${best} is the fastest, ${speedup.toFixed(2)}×.`;
  if (best === record.steps) return `With these costs ${fastest} More guesses add less and less.`;
  return `No. With these costs ${fastest} Every further guess costs time, and it counts only if all guesses before it were kept.`;
}

function answerCosts(tau) {
  const { length, verification, draftStep } = settings;
  const limit = (speedup) => (tau / speedup - length * draftStep).toFixed(2);
  answer("v", `Above a verification of ${limit(1.1)} plain steps. Above ${limit(1)} it is slower than plain decoding.`);
  const most = (tau - verification) / length;
  answer("c", most > 0
    ? `Drafting pays off as long as a draft step takes less than ${most.toFixed(3)} plain steps.`
    : "No head is fast enough here: the verification alone costs more than the tokens of a round.");
}

function answerPerfectHead(texts) {
  const { tau } = averageRounds(texts, { ...settings, isPerfect: true });
  const reason = tau > settings.length + 0.99
    ? "Every guess is kept, so K limits it."
    : "Even then some guesses are lost: the target samples, and the text often has another token than the likeliest.";
  answer("perfect", `${tau.toFixed(2)} tokens per round and ${speedupOf(tau, settings).toFixed(2)}×, at the same cost. ${reason}`);
}

function answerTemperature(cold, warm) {
  const tauOf = (texts, isSampled) =>
    averageRounds(compared(texts, settings.task), { ...settings, isSampled, isPerfect: false }).tau.toFixed(2);
  answer("temperature", `At temperature 0 a round writes ${tauOf(cold, false)} tokens. At temperature 1 it writes ` +
    `${tauOf(warm, false)} with likeliest and ${tauOf(warm, true)} with sampled drafts. A sampling target often writes another ` +
    "token than the likeliest one, and then a likeliest guess is lost. A sampled guess varies like the text. It is accepted with " +
    "all of the probability that p and q have in common.");
}

// ---------------------------------------------------------------- lanes

const lastRootOf = () => rounds.length ? rounds.at(-1).root + rounds.at(-1).accepted + 1 : 0;
const endOfPlain = lastRootOf;
const endOfDrafted = () => rounds.length * roundCost(settings);

function tokenSpan(token, kind, time) {
  const span = element("span", `token ${kind}`, pieceOf(token));
  span.dataset.time = time;
  span.title = kind;
  return span;
}

// The first round with an accepted and a rejected token.
function firstInstructiveRound() {
  const found = rounds.findIndex(({ accepted }) => accepted > 0 && accepted < settings.length);
  return Math.max(found, 0);
}

function showLanes(positions) {
  shownText = positions;
  rounds = drawnRounds(shownText, settings, draw);
  if (chosenRound === null || chosenRound >= rounds.length) chosenRound = firstInstructiveRound();
  const tokens = tokensOf(settings.prompt).slice(0, lastRootOf() + 1);
  one(".plain .text").replaceChildren(...tokens.map((token, index) => tokenSpan(token, "plain", index)));

  const buttons = rounds.map(({ root: first, accepted }, index) => {
    const button = asButton(element("span", "round"), () => chooseRound(index));
    const time = (index + 1) * roundCost(settings);
    button.dataset.time = time;
    const added = accepted === settings.length ? "bonus" : "corrected";
    for (let place = first + 1; place <= first + accepted + 1; place++) {
      button.append(tokenSpan(tokens[place], place <= first + accepted ? "accepted" : added, time));
    }
    button.setAttribute("aria-label", `round ${index + 1}: ${button.textContent}, ${accepted} accepted`);
    return button;
  });
  one(".drafted .text").replaceChildren(tokenSpan(tokens[0], "plain", 0), ...buttons);
  one(".question").textContent = record.prompts[settings.prompt].question.trim();
  one(".legend").replaceChildren(...treeLegend(["accepted", "corrected", "bonus"]));
  field("again").hidden = !(settings.isSampled && settings.temperature > 0);
  const isAtEnd = running === null && clock >= Number(field("time").max);
  field("time").max = Math.max(endOfPlain(), endOfDrafted());
  if (isAtEnd) clock = Infinity;
  showClock();
  chooseRound(chosenRound);
}

function showClock() {
  clock = Math.min(clock, Number(field("time").max));
  field("time").value = clock;
  say("clock", clock.toFixed(1));
  for (const [lane, end, passes] of [
    [".plain", endOfPlain(), Math.min(Math.floor(clock), endOfPlain())],
    [".drafted", endOfDrafted(), Math.min(Math.floor(clock / roundCost(settings) + 1e-9), rounds.length)],
  ]) {
    one(`${lane} .track i`).style.width = `${100 * Math.min(clock / (end || 1), 1)}%`;
    const done = clock >= end ? `, done after ${end.toFixed(1)} plain steps` : "";
    one(`${lane} .passes`).textContent = `${passes} passes of the target${done}`;
    for (const token of all(`${lane} [data-time]`)) token.classList.toggle("later", token.dataset.time > clock + 1e-9);
  }
  field("play").textContent = running === null ? "Play" : "Pause";
}

// ---------------------------------------------------------------- animation

function frame(now) {
  if (running === null) return;
  clock += (now - running) / 1000 / SECONDS_PER_STEP;
  running = clock < Number(field("time").max) ? now : null;
  showClock();
  requestAnimationFrame(frame);
}

function play() {
  if (clock >= Number(field("time").max)) clock = 0;
  running = performance.now();
  requestAnimationFrame(frame);
  showClock();
}

function pause() {
  running = null;
  showClock();
}

function toNextRound() {
  const cost = roundCost(settings);
  running = null;
  clock = clock >= Number(field("time").max) ? cost : cost * (Math.floor(clock / cost + 1e-9) + 1);
  showClock();
}

// ---------------------------------------------------------------- inside a round

function chooseRound(index) {
  chosenRound = index;
  all(".round").forEach((button, number) => button.classList.toggle("chosen", number === index));
  if (!rounds.length) {
    one(".round-words").textContent = "This text is too short for a round of this length.";
    one(".tree").replaceChildren();
    one(".probabilities").replaceChildren();
    return;
  }
  const draft = draftOfRound(rounds[index]);
  const { accepted } = rounds[index];
  const counts = `${settings.length} drafted, ${accepted} accepted, 1 ${draft.kinds.at(-1)}`;
  one(".round-words").textContent =
    `Round ${index + 1} of ${rounds.length}: ${counts}. Choose a token to see its probabilities.`;
  showTree(rounds[index], draft);
}

// A round as a tree of one branch: the root, the drafted tokens, and the token that the target adds.
function draftOfRound({ root: first, accepted }) {
  const { length } = settings;
  const tokens = tokensOf(settings.prompt);
  const texts = tokens.slice(first, first + accepted + 1).map(pieceOf);
  if (accepted < length) {
    const position = shownText[first + accepted + 1];
    // Another number than the one that rejected the token.
    const rejected = rejectedToken(position, accepted + 1, settings, uniform(draw, shownText.length + first));
    texts.push(rejected === null ? "(unlisted)" : pieceOf(position.ids[rejected]));
  }
  while (texts.length <= length) texts.push("(lost)");
  const parents = texts.map((_, node) => node - 1);
  const path = Array.from({ length: accepted }, (_, index) => index + 1);
  const kinds = [...nodeKinds(parents, path), addedKind(parents, path)];
  return { parents: [...parents, accepted], kinds, texts: [...texts, pieceOf(tokens[first + accepted + 1])] };
}

function showTree(round, { parents, kinds, texts }) {
  const column = columnFor(parents, one(".tree"));
  const titles = texts.map((text, node) => `${visible(text)}: ${kinds[node]}`);
  const picture = drawTree({ parents, kinds, texts, titles, column });
  const choose = (node) => {
    for (const group of picture.querySelectorAll(".node")) group.classList.toggle("chosen", Number(group.dataset.node) === node);
    const step = Math.min(node > settings.length ? round.accepted + 1 : node, settings.length);
    showProbabilities(shownText[round.root + step], step);
  };
  const withBars = (node) => node > 0 && (node <= round.accepted + 1 || node > settings.length);
  for (const group of picture.querySelectorAll(".node")) {
    const node = Number(group.dataset.node);
    if (!withBars(node)) continue;
    asButton(group, () => choose(node)).setAttribute("aria-label", titles[node]);
  }
  one(".tree").replaceChildren(picture);
  choose(1);
}

function showProbabilities(position, step) {
  const q = draftOf(position, step, settings);
  const { p, ids, written } = position;
  const order = ids.map((_, index) => index).sort((a, b) =>
    Math.max(p.listed[b], q.listed[b]) - Math.max(p.listed[a], q.listed[a]));
  const shown = order.slice(0, SHOWN_BARS).sort((a, b) => a - b);
  if (!shown.includes(written)) shown.push(written);
  const rows = shown.map((index) => [pieceOf(ids[index]), p.listed[index], q.listed[index], index === written]);
  const hidden = (probs) => ids.reduce((sum, _, index) => shown.includes(index) ? sum : sum + probs.listed[index], probs.others);
  rows.push(["all others", hidden(p), hidden(q), false]);
  one(".probabilities").replaceChildren(...rows.flatMap(([text, pOfToken, qOfToken, isWritten]) => {
    const word = element("span", isWritten ? "word written" : "word", text === "all others" ? text : visible(text));
    const both = element("span", "both");
    for (const [name, mass] of [["of-p", pOfToken], ["of-q", qOfToken]]) {
      const [, bar] = barRow("", mass, "");
      bar.classList.add(name);
      both.append(bar);
    }
    return [word, both, element("span", "note", `${percent(pOfToken)} / ${percent(qOfToken)}`)];
  }));
  const guess = settings.isSampled ? "A guess sampled from q" : "The likeliest guess";
  const chance = settings.isSampled ? commonMass(p, q) : p.listed[likeliest(q.listed)];
  one(".bars-title").replaceChildren(`Guess ${step}. The text has the underlined token. ${guess} is accepted with probability `,
    element("output", "chance", percent(chance)), settings.isSampled ? ", what p and q have in common." : ", its p.");
  one(".chance").dataset.value = chance;
  one(".certain").hidden = settings.temperature > 0;
}

// ---------------------------------------------------------------- start

function fillChoices() {
  for (const [task, title] of Object.entries(TASKS)) {
    const group = element("optgroup");
    group.label = title;
    record.prompts.forEach((prompt, index) => {
      if (prompt.task === task) group.append(new Option(prompt.question.trim().replace(/\s+/g, " ").slice(0, 90), index));
    });
    field("prompt").append(group);
  }
  field("prompt").value = record.shown;
  field("task").append(new Option(`all ${record.prompts.length} prompts`, "all"));
  field("task").append(...Object.entries(TASKS).map(([task, title]) => new Option(title, task)));
  field("machine").append(...record.machines.map(({ name }, index) => new Option(name, index)));
  field("machine").append(new Option("nothing: my own costs", ""));
  one(".recorded").textContent = record.origin;
  say("compared", record.compared);
}

function listen() {
  for (const name of ["length", "machine"]) {
    field(name).addEventListener("input", () => { takeMeasuredCosts(); update(); });
  }
  for (const name of ["v", "c"]) {
    field(name).addEventListener("input", () => { field("machine").value = ""; update(); });
  }
  for (const name of ["temperature", "task"]) field(name).addEventListener("input", update);
  all("[type=radio]").forEach((radio) => radio.addEventListener("input", update));
  field("prompt").addEventListener("input", () => { chosenRound = null; update(); });
  field("play").addEventListener("click", () => running === null ? play() : pause());
  field("step").addEventListener("click", toNextRound);
  field("again").addEventListener("click", () => { draw += 1; update(); });
  field("time").addEventListener("input", () => { running = null; clock = Number(field("time").value); showClock(); });
  new ResizeObserver(() => { if (settings) chooseRound(chosenRound); }).observe(one(".tree"));
}

async function start() {
  fillChoices();
  field("length").value = 3;
  field("temperature").value = 0;
  one("[name=sampled][value=yes]").checked = true;
  one("[name=perfect][value=no]").checked = true;
  takeMeasuredCosts();
  listen();
  await update();
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
}

start();

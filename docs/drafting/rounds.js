// The mathematics of the page: reads the record of docs/recorded/drafting.py and computes rounds from it. No drawing.

const SMALLEST_LOG = -14;
const ZERO = 255;
const probability = (byte) => byte === ZERO ? 0 : Math.exp(SMALLEST_LOG * (byte / ZERO) ** 2);

async function unzipped(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The positions of a text. Position t > 0 has the listed tokens (`ids`) and the place of the text's token among them
// (`written`), the target's distribution `p`, and for each draft step the head's distribution `drafts[k - 1]`. A
// distribution has `listed`, one probability per token, and `others`, the probability of all other tokens together. Of a
// draft, `common` is the sum of min(p, q) over those others.
async function positionsOf({ tokens, data }, numSteps) {
  const bytes = await unzipped(data);
  let at = 0;
  const take = (count) => bytes.subarray(at, at += count);
  const takeProbabilities = (count) => Array.from(take(count), probability);

  return tokens.map((token, t) => {
    if (t === 0) return null;
    const [count] = take(1);
    const low = take(count);
    const high = take(count);
    const ids = Array.from(low, (byte, index) => byte + 256 * high[index]);
    const p = { listed: takeProbabilities(count), others: takeProbabilities(1)[0] };
    const drafts = Array.from({ length: Math.min(numSteps, t) }, () => {
      const listed = takeProbabilities(count);
      const [others, common] = takeProbabilities(2);
      return { listed, others, common };
    });
    return { ids, written: ids.indexOf(token), p, drafts };
  });
}

// The distribution that draft step `step` proposes from. A perfect head knows the target's.
const draftOf = (position, step, { isPerfect }) =>
  isPerfect ? { ...position.p, common: position.p.others } : position.drafts[step - 1];

const likeliest = (values) => values.indexOf(Math.max(...values));

// The sum of min(p, q) over all tokens: the chance that a token sampled from q is accepted.
function commonMass(p, q) {
  return p.listed.reduce((total, mass, index) => total + Math.min(mass, q.listed[index]), q.common);
}

// The chance that a draft step is accepted, given the token y that the text has here. The output follows p, so y is
// output with probability p(y). It is drafted and accepted with probability min(p(y), q(y)), and the quotient is this
// chance. A likeliest token is accepted exactly if the text has it.
function chanceOf(position, step, settings) {
  const q = draftOf(position, step, settings);
  const { written, p } = position;
  if (!settings.isSampled) return likeliest(q.listed) === written ? 1 : 0;
  if (settings.isPerfect) return 1;
  // A recorded zero is less than a millionth.
  return p.listed[written] > 0 ? Math.min(1, q.listed[written] / p.listed[written]) : 0;
}

// Whether the text has every token that a round from this root can emit.
const fits = (positions, root, length) => root + length + 1 < positions.length;

// Expected rounds over a text, without a random number: each root has the probability that a round starts there.
// `accepted[k - 1]` is the expected number of rounds that accept at least k tokens.
function expectedRounds(positions, settings) {
  const { length } = settings;
  const starts = positions.map((_, root) => root === 0 ? 1 : 0);
  const accepted = Array(length).fill(0);
  let rounds = 0;
  for (let root = 0; fits(positions, root, length); root++) {
    let reached = starts[root];
    rounds += reached;
    for (let step = 1; step <= length; step++) {
      const chance = chanceOf(positions[root + step], step, settings);
      // After a rejection, the target's own token is the next root.
      starts[root + step] += reached * (1 - chance);
      reached *= chance;
      accepted[step - 1] += reached;
    }
    starts[root + length + 1] += reached;
  }
  return { rounds, accepted };
}

// Rounds over many texts: of all rounds, the share that accepts at least k tokens, and tau, the tokens per round.
function averageRounds(texts, settings) {
  const sums = texts.map((positions) => expectedRounds(positions, settings));
  const rounds = sums.reduce((total, sum) => total + sum.rounds, 0);
  const shares = Array.from({ length: settings.length }, (_, index) =>
    sums.reduce((total, sum) => total + sum.accepted[index], 0) / rounds);
  return { shares, tau: shares.reduce((total, share) => total + share, 1) };
}

// A number in [0, 1) for each position and draw; the same for the same arguments (the mixer of MurmurHash3).
function uniform(draw, position) {
  let bits = Math.imul(draw + 1, 0x9e3779b1) ^ Math.imul(position + 1, 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 16), 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
  return ((bits ^ (bits >>> 16)) >>> 0) / 2 ** 32;
}

// One possible course of the rounds over a text: the root of each round and the number of accepted tokens.
function drawnRounds(positions, settings, draw) {
  const rounds = [];
  let root = 0;
  while (fits(positions, root, settings.length)) {
    let accepted = 0;
    while (accepted < settings.length) {
      const place = root + accepted + 1;
      if (uniform(draw, place) >= chanceOf(positions[place], accepted + 1, settings)) break;
      accepted += 1;
    }
    rounds.push({ root, accepted });
    root += accepted + 1;
  }
  return rounds;
}

// The listed token that was drafted and rejected; null for one that is not listed. Given a rejection, a sampled token has
// the probability max(q - p, 0), normalized; `chance` in [0, 1) chooses it.
function rejectedToken(position, step, settings, chance) {
  const q = draftOf(position, step, settings);
  if (!settings.isSampled) return likeliest(q.listed);
  const excess = q.listed.map((mass, index) => Math.max(mass - position.p.listed[index], 0));
  const ofOthers = Math.max(q.others - q.common, 0);
  let left = chance * excess.reduce((total, mass) => total + mass, ofOthers);
  const index = excess.findIndex((mass) => (left -= mass) < 0);
  return index < 0 ? null : index;
}

const roundCost = ({ verification, draftStep, length }) => verification + length * draftStep;

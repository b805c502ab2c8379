// Search: headings of guides first, then other text of guides, then notebooks, the API and the changelog.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) =>
    score + (kind === "title" ? 100 : 0) - (/^(api|notebooks|repository)\//.test(page) ? 50 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

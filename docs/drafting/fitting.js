// Draft trees on narrow screens: the width of a level with which drawTree of trees.js fills its place, and no more.
function columnFor(parents, place) {
  const levels = placesOf(parents).depth + 1;
  return Math.max(46, Math.min(112, Math.floor((place.clientWidth - 12) / levels)));
}

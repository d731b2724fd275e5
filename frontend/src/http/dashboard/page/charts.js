// Line and scatter charts as SVG, as wide as their container.

import { colour, el, svg } from './dom.js';

const HEIGHT = 200;
const EDGE = { left: 44, right: 12, top: 10, bottom: 26 };
const TICKS = 4;

// Returns the maximum of any number of values, or 0 if there are none. Math.max takes only a limited number of arguments.
function greatest(values) {
  return values.reduce((one, other) => Math.max(one, other), 0);
}

// Returns the smallest of 1, 2, 5, 10, 20, … that is at least `value`.
export function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

function frame(place, { label, x, y }) {
  const width = Math.max(place.clientWidth, 240);
  const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
  const atX = (value) => EDGE.left + (inner.width * (value - x.min)) / (x.max - x.min || 1);
  const atY = (value) => EDGE.top + inner.height * (1 - value / y.max);
  const chart = svg('svg', { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': label });
  for (let tick = 0; tick <= TICKS; tick += 1) {
    const value = (y.max * tick) / TICKS;
    chart.append(
      svg('line', { class: 'grid', x1: EDGE.left, x2: width - EDGE.right, y1: atY(value), y2: atY(value) }),
      svg('text', { class: 'tick', x: EDGE.left - 6, y: atY(value) + 4, 'text-anchor': 'end' }, y.format(value)),
    );
  }
  for (const [value, text, anchor] of x.ticks) {
    chart.append(svg('text', { class: 'tick', x: atX(value), y: HEIGHT - 8, 'text-anchor': anchor }, text));
  }
  return { chart, atX, atY };
}

// Draws `series`, a list of { name, points: [[time, value or null], …] }. `span` has the first and the last time.
export function lineChart(place, { series, span: [from, to], max, format, what }) {
  const latest = series.map(({ name, points }) => [name, points.findLast(([, value]) => value !== null)?.[1]]);
  const known = latest.filter(([, value]) => value !== undefined);
  if (known.length === 0) return place.replaceChildren(el('p', { class: 'empty' }, 'No prompt was computed in the last hour.'));
  const begin = Math.min(from, to - 60_000);
  const minutes = Math.round((to - begin) / 60_000);
  const y = { max: max ?? niceMax(greatest(series.flatMap(({ points }) => points.map(([, value]) => value ?? 0)))), format };
  const x = { min: begin, max: to, ticks: [[begin, `${minutes} min ago`, 'start'], [to, 'now', 'end']] };
  const label = `${what}, latest: ${known.map(([name, value]) => `${name} ${format(value)}`).join(', ')}`;
  const { chart, atX, atY } = frame(place, { label, x, y });
  for (const { name, points } of series) {
    let path = '';
    let pen = false;
    points.forEach(([at, value], index) => {
      if (value === null) {
        pen = false;
        return;
      }
      path += `${pen ? 'L' : 'M'}${atX(at).toFixed(1)} ${atY(value).toFixed(1)}`;
      const alone = !pen && (points[index + 1]?.[1] ?? null) === null;
      if (alone) chart.append(svg('circle', { class: `dot ${colour(name)}`, cx: atX(at), cy: atY(value), r: 2.5 }));
      pen = true;
    });
    chart.append(svg('path', { class: `line ${colour(name)}`, d: path }));
  }
  return place.replaceChildren(chart);
}

// Draws `points`, a list of { x, y, name, title, open }. `x` and `y` have the same unit. A click on a point calls `open`.
export function scatterChart(place, { points, format, what }) {
  if (points.length === 0) return place.replaceChildren(el('p', { class: 'empty' }, 'No prompt with a worker’s report yet.'));
  const max = niceMax(Math.max(1, greatest(points.map(({ x, y }) => Math.max(x, y)))));
  const ticks = [[0, '0', 'start'], [max / 2, 'predicted tokens', 'middle'], [max, format(max), 'end']];
  const { chart, atX, atY } = frame(place, { label: what, x: { min: 0, max, ticks }, y: { max, format } });
  chart.append(svg('line', { class: 'equal', x1: atX(0), y1: atY(0), x2: atX(max), y2: atY(max) }));
  for (const { x, y, name, title, open } of points) {
    const dot = svg('circle', { class: `point ${colour(name)}`, cx: atX(x), cy: atY(y), r: 4 }, svg('title', {}, title));
    dot.addEventListener('click', open);
    chart.append(dot);
  }
  return place.replaceChildren(chart);
}

// Reads /metrics, and keeps earlier values of the workers' totals.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { '\\\\': '\\', '\\"': '"', '\\n': '\n' };

const SAMPLES_MAX = 450;
// Each point of a line is the ratio of two increases over this many milliseconds. Ratios over the time between two updates would fluctuate
// more.
const WINDOW_MS = 10_000;

// Parses Prometheus' text format. Returns a function that sums those series of a metric family that have the given labels.
export function read(text) {
  const samples = [];
  for (const line of text.split('\n')) {
    const parts = line.startsWith('#') ? null : LINE.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? '').matchAll(LABEL)) {
      labels[name] = value.replace(/\\[\\"n]/g, (escaped) => ESCAPED[escaped]);
    }
    samples.push({ name: parts[1], labels, value: Number(parts[3]) });
  }
  return (name, labels = {}) =>
    samples
      .filter((sample) => sample.name === name && Object.entries(labels).every(([key, value]) =>
        value instanceof RegExp ? value.test(sample.labels[key] ?? '') : sample.labels[key] === value))
      .reduce((sum, sample) => sum + sample.value, 0);
}

// Snapshots of the workers' totals, oldest first.
const snapshots = [];
// The sums of the periods before the first snapshot, oldest first.
let periods = [];
const FIELDS = { cached: 'cached_tokens', tokens: 'prompt_tokens', overlap: 'overlap_blocks', prompts: 'prompts' };

// Sets the periods with which the lines begin. They count only the prompts of this frontend.
export function begin(history) {
  periods = history;
}

export function note(at, workers) {
  const totals = new Map();
  for (const { worker, instance_id, cache, placements } of workers) {
    if (!cache) continue;
    // The number of prompts is in the router's report. Without a report it is NaN, so the ratio is null.
    const prompts = placements ? placements.prefill + placements.local : NaN;
    totals.set(worker, { instance_id, prompts, overlap: placements?.overlap_blocks, tokens: cache.prompt_tokens, cached: cache.cached_tokens });
  }
  snapshots.push({ at, totals });
  if (snapshots.length > SAMPLES_MAX) snapshots.shift();
}

// Returns one line per worker. Each point has a time and a ratio: the increase of the total `part` divided by the increase of the total
// `all`, over the window before that time. The ratio is null if `all` did not increase.
export function lines(part, all) {
  const now = snapshots.flatMap((snapshot) => [...snapshot.totals.keys()]);
  const names = [...new Set([...periods.flatMap(({ workers }) => Object.keys(workers)), ...now])];
  return names.map((name) => ({ name, points: [
    ...earlier(name, part, all),
    ...snapshots.map((snapshot, index) => [snapshot.at, ratio(name, index, part, all)]),
  ] }));
}

function earlier(name, part, all) {
  const points = [];
  for (const { end_unix_ms: end, workers } of periods) {
    // A period without prompts interrupts the line.
    if (points.length > 0 && end - points[points.length - 1][0] > WINDOW_MS) points.push([end - WINDOW_MS, null]);
    const sums = workers[name];
    points.push([end, sums ? sums[FIELDS[part]] / sums[FIELDS[all]] : null]);
  }
  return points;
}

function ratio(name, index, part, all) {
  const now = snapshots[index].totals.get(name);
  let first = index;
  while (first > 0 && snapshots[index].at - snapshots[first].at < WINDOW_MS) first -= 1;
  const before = snapshots[first].totals.get(name);
  // The totals begin at 0 again when the worker or the router restarts.
  if (!now || !before || now.instance_id !== before.instance_id) return null;
  const added = now[all] - before[all];
  return added > 0 && now[part] >= before[part] ? (now[part] - before[part]) / added : null;
}

export function span() {
  if (snapshots.length === 0) return [0, 0];
  return [Math.min(snapshots[0].at, ...periods.slice(0, 1).map(({ end_unix_ms: end }) => end)), snapshots[snapshots.length - 1].at];
}

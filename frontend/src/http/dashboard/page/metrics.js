// What /metrics says, and what this page has seen of the workers over time.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { '\\\\': '\\', '\\"': '"', '\\n': '\n' };

const SAMPLES_MAX = 450;
// Points of a line are ratios over so many milliseconds: steadier than from look to look.
const WINDOW_MS = 10_000;

// Prometheus' text format as a function: the sum of a family's series that have these labels.
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

// Looks at the workers' totals, oldest first.
const looks = [];

export function note(at, workers) {
  const totals = new Map();
  for (const { worker, instance_id, cache, placements } of workers) {
    if (!cache) continue;
    // What no router tells has no ratio.
    const prompts = placements ? placements.prefill + placements.local : NaN;
    totals.set(worker, { instance_id, prompts, overlap: placements?.overlap_blocks, tokens: cache.prompt_tokens, cached: cache.cached_tokens });
  }
  looks.push({ at, totals });
  if (looks.length > SAMPLES_MAX) looks.shift();
}

// A line a worker: [time, part / all] for what was added within each window, null where nothing was.
export function lines(part, all) {
  const names = [...new Set(looks.flatMap((look) => [...look.totals.keys()]))];
  return names.map((name) => ({ name, points: looks.map((look, index) => [look.at, ratio(name, index, part, all)]) }));
}

function ratio(name, index, part, all) {
  const now = looks[index].totals.get(name);
  let first = index;
  while (first > 0 && looks[index].at - looks[first].at < WINDOW_MS) first -= 1;
  const before = looks[first].totals.get(name);
  // An instance's totals begin at 0, and so do those of a router that was started anew.
  if (!now || !before || now.instance_id !== before.instance_id) return null;
  const added = now[all] - before[all];
  return added > 0 && now[part] >= before[part] ? (now[part] - before[part]) / added : null;
}

export function span() {
  return looks.length === 0 ? [0, 0] : [looks[0].at, looks[looks.length - 1].at];
}

// The prompts that this frontend has recorded, newest first, and their statistics.

import { arrange, brief, byId, clock, colour, count, counted, duration, el, setText } from './dom.js';
import { scatterChart } from './charts.js';
import { openTimeline } from './timeline.js';
import { sentence } from './why.js';

const PAGE = 25;
// The maximum number of points in the chart. Each point is an SVG element that is drawn again at every update.
const POINTS_MAX = 500;

let records = [];
let shown = PAGE;
const rows = new Map();

export function newest() {
  return records[0]?.number ?? 0;
}

export function forget() {
  records = [];
  rows.clear();
}

// Adds new records, the oldest first.
export function take({ requests, max }) {
  records = [...requests.toReversed(), ...records].slice(0, max);
}

// Returns the worker that computed the prompt.
const computedOn = (record) => record.prefill_worker ?? record.decode_worker;
const reported = (record) => record.cached_tokens !== null && record.cached_tokens_source === 'worker';
const resumedOn = (record) => record.resumed_on.map(({ worker }) => worker);
export const predictedTokens = (record) => record.overlap_blocks * (record.block_size ?? 0);

export function firstTokens() {
  return records.map((record) => record.steps.first_token_ms).filter((ms) => ms !== null).sort((a, b) => a - b);
}

const ORDERS = {
  'newest': null,
  'first-token': (record) => -(record.steps.first_token_ms ?? -1),
  'total': (record) => -record.steps.ended_ms,
  'cached': (record) => (record.cached_tokens === null ? 2 : record.cached_tokens / record.prompt_tokens),
};

export function showRequests() {
  const words = byId('filter').value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (record) => [record.request_id, record.status, record.endpoint, record.prefill_worker, record.decode_worker,
    ...resumedOn(record), record.cached_tokens_source].join(' ').toLowerCase();
  const found = records.filter((record) => words.every((word) => text(record).includes(word)));
  const key = ORDERS[byId('order').value];
  if (key) found.sort((one, other) => key(one) - key(other));
  const page = found.slice(0, shown);
  for (const number of rows.keys()) if (number <= newest() - records.length) rows.delete(number);
  arrange(byId('recent').tBodies[0], page.map(row));
  byId('more').hidden = found.length <= shown;
  setText(byId('requests-sum'), records.length === 0 ? 'None yet.' : `${count(page.length)} of ${count(found.length)} shown`);
}

// Shows the refused requests of which no prompt was admitted. The other refused requests are among the records.
export function showRefused({ refusals }) {
  const admitted = new Set(records.map(({ request_id: id }) => id.slice(0, id.lastIndexOf('-'))));
  const found = refusals.filter(({ request_id: id }) => !admitted.has(id)).toReversed();
  const cell = (field, text, kind) => el('td', { 'data-field': field, class: kind }, text);
  byId('refused').tBodies[0].replaceChildren(...found.map(({ at_unix_ms: at, request_id: id, endpoint, status: code, code: name }) =>
    el('tr', { 'data-request': id }, cell('at', clock(at)), cell('request', id, 'left'), cell('endpoint', endpoint, 'left'),
      cell('status', status(code), 'problem'), cell('code', name ?? '–', 'left'))));
  setText(byId('refused-sum'), found.length === 0 ? 'None.' : 'The latest ones of this frontend. Clients received a message with the code.');
}

function row(record) {
  if (!rows.has(record.number)) rows.set(record.number, makeRow(record));
  return rows.get(record.number);
}

function makeRow(record) {
  const cell = (field, ...content) => el('td', { 'data-field': field }, ...content);
  const worker = (name) => (name === null ? ['–'] : [el('i', { class: `swatch ${colour(name)}` }), name]);
  const open = el('button', { type: 'button', class: 'link', title: record.request_id, 'aria-haspopup': 'dialog' }, shortId(record));
  open.addEventListener('click', () => openTimeline(record));
  const estimate = record.cached_tokens_source !== 'worker' && record.cached_tokens !== null;
  return el('tr', { 'data-request': record.request_id },
    cell('ended', clock(record.ended_unix_ms)),
    el('th', { scope: 'row' }, open),
    cell('status', el('span', { class: record.status < 400 ? '' : 'problem' }, status(record.status))),
    cell('prompt_tokens', count(record.prompt_tokens)),
    el('td', { 'data-field': 'cached_tokens', title: sentence(record) }, count(record.cached_tokens), estimate ? el('span', { class: 'badge bad' }, 'estimate') : null),
    cell('completion_tokens', count(record.completion_tokens)),
    cell('prefill_worker', ...(record.prefill_worker === null && record.decode_worker !== null ? ['on decode'] : worker(record.prefill_worker))),
    cell('decode_worker', ...worker(record.decode_worker), ...resumedOn(record).flatMap((name) => [' → ', ...worker(name)])),
    cell('first_token', duration(record.steps.first_token_ms)),
    cell('total', duration(record.steps.ended_ms)));
}

// Shortens an id to its beginning, which identifies the request, and its end, which is the prompt's index in the request.
export function shortId({ request_id: id }) {
  return id.length > 14 ? `${id.slice(0, 8)}…${id.slice(id.lastIndexOf('-'))}` : id;
}

export function status(code) {
  return code === 499 ? 'client disconnected' : String(code);
}

export function showScatter() {
  const known = records.filter(reported).slice(0, POINTS_MAX);
  const points = known.map((record) => ({
    x: predictedTokens(record),
    y: record.cached_tokens,
    name: computedOn(record),
    title: `${computedOn(record)}: ${count(predictedTokens(record))} predicted, ${count(record.cached_tokens)} reported of ${count(record.prompt_tokens)}`,
    open: () => openTimeline(record),
  }));
  const over = points.filter(({ x, y }) => x > y).length;
  const under = points.filter(({ x, y }) => x < y).length;
  const sum = `The latest ${counted(points.length, 'prompt')}: ${count(points.length - over - under)} as predicted, ${count(over)} with fewer cached tokens, ${count(under)} with more.`;
  scatterChart(byId('scatter'), { points, format: brief, what: `Predicted and reported cached tokens. ${sum}` });
  setText(byId('scatter-sum'), points.length > 0 ? `${sum} Horizontal: predicted; vertical: reported.` : '');
}

export function listenToRequests() {
  const again = () => {
    shown = PAGE;
    showRequests();
  };
  byId('order').addEventListener('change', again);
  byId('filter').addEventListener('input', again);
  byId('more').addEventListener('click', () => {
    shown += PAGE;
    showRequests();
  });
}

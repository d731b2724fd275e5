// The stages of one request as bars and as a table.

import { byId, bytes, clock, count, counted, duration, el, svg } from './dom.js';
import { about, head } from './terms.js';
import { prefixFacts, sentence } from './why.js';

// Returns the decode workers of a request in order, each with the tokens that it generated.
function generated({ decode_worker: first, resumed_on: later, completion_tokens: all }) {
  const parts = [{ worker: first, after_tokens: 0 }, ...later];
  const tokens = (at) => (parts[at + 1]?.after_tokens ?? all) - parts[at].after_tokens;
  return parts.map(({ worker }, at) => `${worker}, ${counted(tokens(at), 'token')}`).join('; ');
}

// Returns the stages of a request, from its arrival on.
function phases({ steps, kv_transfer_ms: transfer, ...record }) {
  const place = record.prefill_worker ?? record.decode_worker;
  // The prompt's last token is computed in the first step of the answer.
  const computed = record.prompt_tokens - (record.cached_tokens ?? 0) - 1;
  const found = [
    ['read', 'Read and tokenize', 0, steps.requested_ms, 'frontend'],
    ['route', steps.failed.length > 0 ? 'Route and failed attempts' : 'Route', steps.requested_ms, steps.placed_ms, 'router'],
    ['queue', 'Queue', steps.placed_ms, steps.scheduled_ms, place],
    ['prefill', 'Prefill', steps.scheduled_ms, steps.started_ms, `${place}, ${counted(computed, 'token')}`],
    ['transfer', 'KV transfer', steps.started_ms === null ? null : Math.max(steps.started_ms - transfer, 0), transfer > 0 ? steps.started_ms : null,
      `${bytes(record.kv_transfer_bytes)} to ${record.decode_worker}, during prefill`],
    ['first', 'First step', steps.started_ms, steps.first_token_ms, `${record.decode_worker}, the prompt’s last token`],
    ['decode', 'Decode', steps.first_token_ms, steps.ended_ms, generated(record)],
  ].filter(([, , from, to]) => from !== null && to !== null);
  // Without a first token, only the time at which the request ended is known.
  return found.length > 0 ? found : [['read', 'Until its end', 0, steps.ended_ms, 'no first token']];
}

// The chunks of the prefill, if there is more than one. A worker reports at most 64 chunks, and the last one includes all later chunks. The
// times are from the worker's clock, so the last chunk may end shortly after the stage.
const chunksOf = ({ chunks }) => (chunks.length > 1 ? chunks : []);

function bars(list, steps) {
  const total = Math.max(steps.ended_ms, 0.001);
  const height = 18 * list.length;
  const chart = svg('svg', { class: 'bars', viewBox: `0 0 1000 ${height}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  list.forEach(([kind, , from, to], index) => {
    const bar = (name, from, to, thinner) => {
      const width = Math.max((1000 * (to - from)) / total, thinner ? 1 : 3);
      const x = Math.min((1000 * from) / total, 1000 - width);
      return svg('rect', { class: `bar bar-${name}`, x, y: 18 * index + 2 + thinner, width, height: 14 - 2 * thinner });
    };
    const back = svg('rect', { class: 'bar-back', x: 0, y: 18 * index + 2, width: 1000, height: 14 });
    const parts = kind === 'prefill' ? chunksOf(steps) : [];
    chart.append(back, bar(kind, from, to, 0), ...parts.map(({ start_ms: at, duration_ms: took }) => bar('chunk', at, at + took, 4)));
  });
  for (const { at_ms: at } of steps.failed) {
    chart.append(svg('line', { class: 'failed', x1: (1000 * at) / total, x2: (1000 * at) / total, y1: 0, y2: height }));
  }
  return chart;
}

function facts(record) {
  const tiers = Object.entries(record.cached_tokens_by_tier).map(([tier, tokens]) => `${tier} ${count(tokens)}`).join(', ');
  const source = { worker: 'counted by the worker', router_estimate: 'estimated by the router', unknown: 'not known' };
  const cached = record.cached_tokens === null ? (record.steps.first_token_ms === null ? 'no first token' : 'not reported before the end')
    : `${count(record.cached_tokens)} (${source[record.cached_tokens_source]}${tiers ? `; ${tiers}` : ''})`;
  const predicted = record.block_size === null ? '–'
    : `${counted(record.overlap_blocks, 'block')}, ${counted(record.overlap_blocks * record.block_size, 'token')}`;
  // The workers are known only when the first token has arrived.
  const started = record.steps.first_token_ms !== null;
  const known = (text) => (started ? text : 'not known');
  const list = [
    ['Ended', `${clock(record.ended_unix_ms)}, status ${record.status}${record.status === 499 ? ' (client disconnected)' : ''}`],
    ['Endpoint', `${record.endpoint}${record.streamed ? ', streamed' : ''}${record.samples > 1 ? `, ${record.samples} answers` : ''}`],
    ['Prompt tokens', count(record.prompt_tokens)],
    ['Cached tokens', cached],
    ['Predicted overlap', predicted],
    ...prefixFacts(record),
    ['New tokens', count(record.completion_tokens)],
    ['Prefill worker', known(record.prefill_worker ?? `${record.decode_worker} (decode worker)`)],
    ['Decode worker', known(record.decode_worker)],
    // If the decode worker computed the prompt, its queue is the stage above.
    ...(record.prefill_worker === null ? [] : [['Queue time on the decode worker', duration(record.queue_ms)]]),
    ['Failed attempts', known(record.steps.failed.map(({ at_ms: at, reason }) => `${reason} after ${duration(at)}`).join(', ') || 'none')],
    ['Resumed on another worker',
      record.resumed_on.map(({ worker, after_tokens: tokens }) => `on ${worker}, after ${counted(tokens, 'token')}`).join('; ') || 'no'],
  ];
  return el('dl', { class: 'facts' }, ...list.map(([name, value]) => el('div', {}, el('dt', { title: about(name) }, name), el('dd', {}, value))));
}

function table(id, label, columns, rows) {
  const heads = el('tr', {}, ...columns.map(head));
  // Long names make the table wider than the dialog. It can be scrolled with the keyboard, too.
  return el('div', { class: 'wide', role: 'region', 'aria-label': label, tabindex: '0' },
    el('table', { id }, el('thead', {}, heads), el('tbody', {}, ...rows)));
}

function chunks({ steps }) {
  const list = chunksOf(steps);
  if (list.length === 0) return [];
  const rows = list.map(({ start_ms: from, duration_ms: took, tokens }, index) =>
    el('tr', {}, el('th', { scope: 'row' }, index < 63 ? String(index + 1) : '64 and later'), el('td', {}, duration(from)), el('td', {}, duration(took)), el('td', {}, count(tokens))));
  const many = list.length < 64 ? String(list.length) : '64 or more';
  return [el('details', {}, el('summary', {}, `The prefill’s ${many} chunks`), table('chunks', 'Chunks', ['Chunk', 'Start', 'Duration', 'Tokens'], rows))];
}

export function openTimeline(record) {
  const list = phases(record);
  const rows = list.map(([kind, name, from, to, where]) =>
    el('tr', { 'data-phase': kind },
      el('th', { scope: 'row', title: about(name) }, el('i', { class: `swatch bar-${kind}` }), name),
      el('td', {}, duration(from)), el('td', {}, duration(to - from)), el('td', { class: 'left' }, where)));
  byId('request-title').textContent = `Request ${record.request_id}`;
  const why = sentence(record);
  byId('request-body').replaceChildren(
    ...(why ? [el('p', { class: 'explanation', 'data-field': 'why' }, why)] : []),
    bars(list, record.steps),
    table('steps', 'Stages', ['Stage', 'Start', 'Duration', 'Where'], rows),
    facts(record),
    ...chunks(record),
  );
  byId('request').showModal();
}

export function listenToTimeline() {
  byId('request-close').addEventListener('click', () => byId('request').close());
}

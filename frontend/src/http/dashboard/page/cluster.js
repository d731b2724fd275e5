// The cluster's processes with their health and load, and the table of the workers' counters.

import { arrange, byId, bytes, colour, count, counted, duration, el, share, svg } from './dom.js';
import { about } from './terms.js';

const rows = new Map();

export function showCluster(cluster) {
  byId('front').replaceChildren(frontend(cluster), ...cluster.routers.map(router), ...cluster.wanted.map(wanted), ...audit(cluster));
  for (const role of ['prefill', 'decode']) {
    const workers = cluster.workers.filter((worker) => worker.role === role || (role === 'decode' && worker.role === 'unknown'));
    const decodeWorkersPrefill = role === 'prefill' && cluster.workers.length > 0;
    const none = el('li', { class: 'note' }, decodeWorkersPrefill ? 'None: decode workers prefill.' : 'None.');
    byId(role).replaceChildren(...(workers.length > 0 ? workers.map((worker) => card(worker, cluster.block_size)) : [none]));
  }
  byId('unavailable-part').hidden = cluster.unavailable.length === 0;
  byId('unavailable').replaceChildren(...cluster.unavailable.map(({ address, worker, reason, incompatible, router: by }) =>
    el('li', {}, badge(incompatible ? 'incompatible' : 'unreachable', 'bad'), ' ', el('b', {}, worker || address), `${worker ? ` at ${address}` : ''} – ${reason} (router ${by})`)));
  showTable(cluster.workers);
}

function badge(text, kind) {
  return el('span', { class: `badge ${kind}`, title: about(text) }, text);
}

function frontend({ unavailable_reason: reason, models, version, cluster }) {
  return el('li', { class: 'card' },
    el('div', { class: 'card-head' }, el('b', {}, 'frontend'), reason ? badge('not ready', 'bad') : badge('ready', 'good')),
    el('p', {}, reason ?? `${models.join(', ')}, cluster ${cluster}, version ${version}`));
}

function router({ address, problem, bookings, peer_bookings, peers, synced_workers, known_workers }) {
  const summary = bookings === undefined ? null : [
    counted(bookings, 'booking'),
    peers > 0 ? `${count(peer_bookings)} of ${counted(peers, 'other router')}` : null,
    `${count(synced_workers)} of ${counted(known_workers, 'worker')} synced`,
  ].filter(Boolean).join(' · ');
  return el('li', { class: 'card' },
    el('div', { class: 'card-head' }, el('b', {}, 'router'), problem ? badge('not ready', 'bad') : badge('ready', 'good')),
    el('p', {}, address),
    summary && el('p', {}, summary),
    problem && el('p', { class: 'problem' }, problem));
}

// Shows how many workers of a role the load needs, if the routers have service levels.
function wanted({ model, role, wanted: number, present, reason, cheapest_to_lose: cheapest }) {
  return el('li', { class: 'card', 'data-wanted': role },
    el('div', { class: 'card-head' }, el('b', {}, `${role} workers`), badge(`${count(number)} wanted`, number > present ? 'bad' : 'good')),
    el('p', {}, `${model}: ${count(present)} present${number < present && cheapest ? `; first to lose: ${cheapest}` : ''}`),
    el('p', { class: 'quiet' }, reason));
}

// Shows the result of the last `tandem audit check`, if this frontend has its file.
function audit({ audit: found, now_unix_ms: now }) {
  if (!found) return [];
  const { problem, findings } = found;
  const hours = (now / 1000 - found.checked_unix_s) / 3600;
  const ago = hours < 1 ? 'less than an hour ago' : `${count(Math.floor(hours))} h ago`;
  const result = problem ? 'not known' : findings === 0 ? 'reconciles' : counted(findings, 'finding');
  const checked = problem ?? `Checked ${ago}: ${counted(found.answers, 'answer')}, ${counted(found.estimates, 'estimate')}, ${count(found.unverified)} unverified`;
  return [el('li', { class: 'card', id: 'audit' },
    el('div', { class: 'card-head' }, el('b', {}, 'ledger'), badge(result, findings === 0 ? 'good' : 'bad')),
    el('p', { class: problem ? 'problem' : '' }, checked))];
}

function card(worker, blockSize) {
  const { load } = worker;
  const rate = load.prefill_tokens_per_second > 0 ? `${count(load.prefill_tokens_per_second)} tokens/s prefill` : null;
  const step = load.decode_step_ms > 0 ? `${duration(load.decode_step_ms)} a step` : null;
  const transfer = load.transfer_bytes_per_second > 0 ? `sends ${bytes(load.transfer_bytes_per_second)}/s` : null;
  const measured = [rate, step, transfer].filter(Boolean).join(' · ');
  return el('li', { class: 'card', 'data-worker': worker.worker },
    el('div', { class: 'card-head' },
      el('b', {}, el('i', { class: `swatch ${colour(worker.worker)}` }), worker.worker),
      badge(worker.health.replaceAll('_', ' '), worker.health === 'healthy' ? 'good' : 'bad')),
    worker.problem && el('p', { class: 'problem' }, worker.problem),
    el('p', {}, worker.address),
    blocks(worker, blockSize),
    el('p', {}, `${count(load.running_sequences)} running · ${count(load.waiting_requests)} waiting · ${count(worker.bookings)} booked`),
    load.pending_prefill_tokens > 0 ? el('p', {}, `${counted(load.pending_prefill_tokens, 'token')} to prefill`) : null,
    measured && el('p', { class: 'quiet' }, measured),
    worker.tiers.length > 0 && el('p', { class: 'quiet' }, `blocks by tier: ${worker.tiers.map(tier).join(' · ')}`),
    worker.index_note && el('p', { class: 'quiet' }, `${worker.index_note}; predictions are corrected`),
    worker.approximate_index && el('p', { class: 'quiet' }, 'cache assumed from requests: its engine publishes no KV events'));
}

function tier({ tier: name, blocks, load_ms_per_token: ms }) {
  return `${name} ${count(blocks)}${ms ? ` (${ms.toPrecision(2)} ms to load a token)` : ''}`;
}

// Shows the use of a worker's KV memory.
function blocks({ capacity_blocks: capacity, load }, blockSize) {
  const used = (100 * load.in_use_blocks) / Math.max(capacity, 1);
  const cached = (100 * load.cached_blocks) / Math.max(capacity, 1);
  const text = `KV: ${share(load.in_use_blocks, capacity)} in use, ${share(load.cached_blocks, capacity)} cached of ${count(capacity * blockSize)} tokens`;
  return el('div', {},
    svg('svg', { class: 'blocks', viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('rect', { class: 'blocks-free', width: 100, height: 6 }),
      svg('rect', { class: 'blocks-cached', x: used, width: cached, height: 6 }),
      svg('rect', { class: 'blocks-used', width: used, height: 6 })),
    el('p', { class: 'quiet' }, text));
}

function showTable(workers) {
  const body = byId('workers').tBodies[0];
  const wanted = workers.map((worker) => {
    const key = `${worker.worker} ${worker.instance_id}`;
    if (!rows.has(key)) rows.set(key, el('tr', { 'data-worker': worker.worker }));
    rows.get(key).replaceChildren(...cells(worker));
    return [key, rows.get(key)];
  });
  const keys = new Set(wanted.map(([key]) => key));
  for (const key of rows.keys()) if (!keys.has(key)) rows.delete(key);
  arrange(body, wanted.map(([, row]) => row));
}

function cells({ worker, cache, placements, load, indexed_blocks, approximate_index: approximate }) {
  const cell = (field, text) => el('td', { 'data-field': field }, text);
  const kinds = [['prefill', placements?.prefill], ['decode', placements?.decode], ['both', placements?.local]];
  const placed = kinds.filter(([, number]) => number > 0).map(([kind, number]) => `${kind} ${count(number)}`);
  return [
    el('th', { scope: 'row' }, el('i', { class: `swatch ${colour(worker)}` }), worker),
    cell('prompts', count(cache?.prompts)),
    cell('prompt_tokens', count(cache?.prompt_tokens)),
    cell('cached_tokens', count(cache?.cached_tokens)),
    cell('hit_rate', share(cache?.cached_tokens, cache?.prompt_tokens)),
    cell('overlap_blocks', count(placements?.overlap_blocks)),
    cell('overlap_over_tokens', count(placements?.overlap_over_tokens)),
    cell('overlap_under_tokens', count(placements?.overlap_under_tokens)),
    cell('placements', placed.join(', ') || count(placements && 0)),
    cell('indexed_blocks', `${approximate ? '~' : ''}${count(indexed_blocks)}`),
    cell('free_blocks', count(load.free_blocks)),
    cell('cached_blocks', count(load.cached_blocks)),
    cell('in_use_blocks', count(load.in_use_blocks)),
    cell('waiting_requests', count(load.waiting_requests)),
  ];
}

// Why tokens of prompts were not cached: a sentence for each prompt, the sums of the last hour, and the clients whose prompts change near
// their beginning. Frontends and routers of older versions omit these fields; then nothing is shown.

import { byId, colour, count, counted, duration, el, share, svg } from './dom.js';
import { about, head } from './terms.js';

// The causes with their names on this page. A token has the first cause in this order that applies.
const CAUSES = {
  engine: 'Not found',
  group_rule: 'Group rule',
  not_yet_stored: 'Not yet stored',
  held_elsewhere: 'Held elsewhere',
  evicted: 'Evicted',
  other_namespace: 'Other namespace',
  new_text: 'New text',
  below_block: 'Below a block',
};
const STAGES = [['Prompt', 'facts_prompt_tokens'], ['Possible', 'possible_tokens'], ['Eligible', 'eligible_tokens'],
  ['Expected', 'chosen_tokens'], ['Found', 'found_tokens']];

// Returns the sentence that says why tokens of this prompt were not cached; null if it is not known.
export function sentence({ prefix, prompt_tokens: prompt }) {
  if (!prefix) return null;
  return prefix.summary ?? `${count(prefix.chosen_tokens)} of ${count(prompt)} expected; the worker has not reported how many were cached`;
}

// Returns the facts about a prompt's prefix as pairs of a name and a text.
export function prefixFacts({ prefix }) {
  if (!prefix) return [];
  const { nearest, elsewhere } = prefix;
  const most = `${counted(prefix.possible_tokens, 'token')} on any worker, ${count(prefix.eligible_tokens)} on an eligible one, ${count(prefix.chosen_tokens)} expected`;
  const cost = elsewhere && (typeof elsewhere.more_ms === 'number'
    ? `${duration(elsewhere.more_ms)} more in total, though it saves ${duration(elsewhere.saved_ms)} of computation` : 'it could not compute the prompt');
  return [
    ['Could be cached', most],
    ['Nearest prefix', nearest ? `${counted(nearest.tokens, 'token')}, ${nearest.state}` : 'none'],
    ['On another worker', elsewhere ? `${counted(elsewhere.tokens, 'token')} on ${elsewhere.worker}: ${cost}` : 'no more than on the chosen one'],
    ['Regret', duration(prefix.regret_ms)],
  ];
}

// Returns the sums of all periods by worker.
function totals(periods) {
  const workers = new Map();
  for (const [worker, sums] of periods.flatMap(({ workers: some }) => Object.entries(some))) {
    if (!sums.known_prompts) continue;
    const all = workers.get(worker) ?? { uncached: {} };
    for (const field of ['known_prompts', ...STAGES.map(([, name]) => name)]) all[field] = (all[field] ?? 0) + sums[field];
    for (const [cause, tokens] of Object.entries(sums.uncached ?? {})) all.uncached[cause] = (all.uncached[cause] ?? 0) + tokens;
    workers.set(worker, all);
  }
  return workers;
}

function stage(name, tokens, prompt) {
  const part = (100 * tokens) / Math.max(prompt, 1);
  return el('div', { 'data-stage': name },
    el('dt', { title: about(name) }, name),
    el('dd', {}, `${count(tokens)} (${share(tokens, prompt)})`, svg('svg', { class: 'blocks', viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('rect', { class: 'blocks-free', width: 100, height: 6 }), svg('rect', { class: 'blocks-used', width: part, height: 6 }))));
}

export function showWhy(periods, breakers) {
  const workers = [...totals(periods)].sort(([one], [other]) => one.localeCompare(other, 'en', { numeric: true }));
  const broken = (breakers?.clients ?? []).filter(({ lost_tokens: lost }) => lost > 0);
  byId('why-link').hidden = byId('why').hidden = workers.length === 0 && broken.length === 0;
  byId('funnel-part').hidden = workers.length === 0;
  byId('breakers-part').hidden = broken.length === 0;
  const total = totals([...workers].map(([, sums]) => ({ workers: { all: sums } }))).get('all');
  if (total) showFunnel(workers, total);
  byId('breakers').tBodies[0].replaceChildren(...broken.slice(0, 20).map(breaker));
}

function showFunnel(workers, total) {
  byId('funnel').replaceChildren(...STAGES.map(([name, field]) => stage(name, total[field], total.facts_prompt_tokens)));
  const order = (cause) => (cause in CAUSES ? Object.keys(CAUSES).indexOf(cause) : Infinity);
  const causes = Object.keys(total.uncached).filter((cause) => total.uncached[cause] > 0).sort((one, other) => order(one) - order(other));
  const row = (name, sums, mark) => el('tr', { 'data-worker': name }, el('th', { scope: 'row' }, mark, name),
    ...STAGES.map(([, field]) => el('td', { 'data-field': field }, count(sums[field]))),
    ...causes.map((cause) => el('td', { 'data-field': cause }, count(sums.uncached[cause] ?? 0))));
  byId('causes').tHead.replaceChildren(el('tr', {}, ...['Worker', ...STAGES.map(([name]) => name), ...causes.map((cause) => CAUSES[cause] ?? cause)].map(head)));
  byId('causes').tBodies[0].replaceChildren(
    ...workers.map(([name, sums]) => row(name, sums, el('i', { class: `swatch ${colour(name)}` }))),
    ...(workers.length > 1 ? [row('All workers', total, null)] : []));
}

function breaker({ client, model, prompts, broken_prompts: changed, lost_tokens: lost, first_difference: places }) {
  const [most] = (places ?? []).toSorted((one, other) => other.lost_tokens - one.lost_tokens);
  const cell = (field, text, kind) => el('td', { 'data-field': field, class: kind }, text);
  return el('tr', {}, el('th', { scope: 'row' }, client), cell('model', model, 'left'), cell('prompts', `${count(changed)} of ${count(prompts)}`),
    cell('lost_tokens', count(lost)),
    cell('first_difference', most && lost > 0 ? `from token ${count(most.from_token)} on (${share(most.lost_tokens, lost)})` : null, 'left'));
}

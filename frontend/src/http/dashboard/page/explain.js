// Shows where a prompt would be placed, and why: the frontend's answer to `x-tandem-explain`, as in `tandem route explain`.

import { ask } from './api.js';
import { byId, count, counted, el, inOrder } from './dom.js';
import { about, head } from './terms.js';

const PARTS = ['total', 'queue', 'compute', 'interference', 'transfer', 'handoff', 'decode_load'];
const USES = [['as_prefill', 'prefills'], ['as_decode', 'receives'], ['alone', 'does both']];

async function explanation() {
  const model = byId('explain-model').value;
  const text = byId('prompt').value;
  const chat = byId('as').value === 'chat';
  const body = chat ? { model, messages: [{ role: 'user', content: text }] } : { model, prompt: text };
  body.max_tokens = 1;
  if (byId('salt').value) body.cache_salt = byId('salt').value;
  const answer = await ask(chat ? 'v1/chat/completions' : 'v1/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-tandem-explain': 'true' },
    body: JSON.stringify(body),
  });
  return (await answer.json()).prompts[0];
}

function line(worker, use, name, chosen) {
  const cost = worker[use];
  const cells = PARTS.map((part) => cost[`${part}_ms`].toFixed(1));
  return el('tr', { class: chosen ? 'chosen' : '' },
    el('th', { scope: 'row' }, `${worker.worker} ${name}`, chosen ? el('span', { class: 'badge good', title: about('chosen') }, 'chosen') : null),
    ...[worker.overlap_blocks, worker.predicted_blocks, worker.queued_tokens].map((number) => el('td', {}, count(number))),
    ...cells.map((text) => el('td', {}, text)));
}

function table(prompt) {
  const heads = ['Worker', 'Overlap', 'Predicted', 'Queued', ...PARTS.map((part) => `${part.replaceAll('_', ' ')} ms`)];
  const chosen = (worker, use) => {
    const prefills = prompt.prefill_worker === worker.worker;
    const decodes = prompt.decode_worker === worker.worker;
    return { as_prefill: prefills, as_decode: decodes && prompt.prefill_worker !== null, alone: decodes && prompt.prefill_worker === null }[use];
  };
  prompt.workers.sort(inOrder);
  const rows = prompt.workers.flatMap((worker) =>
    USES.filter(([use]) => worker[use]).map(([use, name]) => line(worker, use, name, chosen(worker, use))));
  return [
    el('p', { class: 'note sideways' }, 'The table is wider than the window: scroll it sideways.'),
    el('div', { class: 'wide', role: 'region', 'aria-label': 'Costs', tabindex: '0' },
      el('table', { id: 'costs' },
        el('thead', {}, el('tr', {}, ...heads.map(head))),
        el('tbody', {}, ...rows))),
  ];
}

export function listenToExplain() {
  const place = byId('explained');
  byId('explain-form').addEventListener('submit', async (event) => {
    event.preventDefault();
    place.replaceChildren(el('p', { class: 'note' }, 'Asking …'));
    try {
      const prompt = await explanation();
      place.replaceChildren(
        el('p', { class: 'explanation' }, prompt.explanation),
        el('p', { class: 'note' }, `${counted(prompt.prompt_tokens, 'token')}, ${counted(prompt.reusable_blocks, 'reusable block')} of ${count(prompt.block_size)} tokens`),
        ...table(prompt));
    } catch (error) {
      place.replaceChildren(el('p', { class: 'problem' }, `Explain failed: ${error.message}`));
    }
    // The style sheet makes this smooth, unless the reader prefers no motion.
    place.scrollIntoView({ block: 'nearest' });
  });
}

// Updates the page every two seconds while it is visible.

import { reach } from './api.js';
import { brief, byId, clock, colour, count, duration, el, inOrder, offerModels, setText, share } from './dom.js';
import { begin, lines, note, read, span } from './metrics.js';
import { lineChart } from './charts.js';
import { showCluster } from './cluster.js';
import { firstTokens, forget, listenToRequests, newest, showRefused, showRequests, showScatter, take } from './requests.js';
import { listenToTimeline } from './timeline.js';
import { listenToExplain } from './explain.js';
import { about, addTooltips } from './terms.js';
import { showWhy } from './why.js';

const PAUSE_MS = 2000;
const ANSWER_MS = 10_000;
// The history has a new period every ten seconds.
const HISTORY_MS = 10_000;

let paused = false;
let since = null;
let timer = null;
let updating = false;
let historyAt = null;

async function get(path) {
  const answer = await reach(path, { signal: AbortSignal.timeout(ANSWER_MS), cache: 'no-store' });
  if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
  return answer;
}

async function getRequests() {
  const found = await (await get(`dashboard/requests?after=${newest()}`)).json();
  if (since === found.since || newest() === 0) {
    since = found.since;
    return found;
  }
  // The frontend was restarted and numbers its records from 1 again.
  forget();
  return getRequests();
}

async function update() {
  const [cluster, metrics, requests] = await Promise.all([
    get('dashboard/cluster').then((answer) => answer.json()),
    get('dashboard/metrics').then((answer) => answer.text()),
    getRequests(),
  ]);
  if (historyAt === null || performance.now() - historyAt > HISTORY_MS) {
    const [{ periods }, breakers] = await Promise.all(['history', 'breakers'].map(async (name) => (await get(`dashboard/${name}`)).json()));
    if (historyAt === null) begin(periods);
    historyAt = performance.now();
    showWhy(periods, breakers);
  }
  offerModels('explain', cluster.models);
  cluster.workers.sort(inOrder);
  cluster.workers.forEach(({ worker }) => colour(worker));
  take(requests);
  note(cluster.now_unix_ms, cluster.workers);
  setText(byId('model'), cluster.models.join(', '));
  document.title = `${cluster.unavailable_reason ? 'Not ready' : 'Tandem'} – ${cluster.model}`;
  setText(byId('state'), cluster.unavailable_reason ? `Not ready: ${cluster.unavailable_reason}` : 'Ready');
  byId('state').className = cluster.unavailable_reason ? 'bad' : 'good';
  byId('state').title = `As of ${clock(cluster.now_unix_ms)}`;
  showTiles(read(metrics));
  showCluster(cluster);
  showCharts();
  showScatter();
  showRequests();
  showRefused(requests);
  addTooltips();
}

function showTiles(metric) {
  const requests = (code) => metric('tandem_frontend_requests_total', { code });
  const [prompt, cached] = ['prompt_tokens_total', 'cached_tokens_total'].map((name) => metric(`tandem_frontend_${name}`));
  const estimates = metric('tandem_frontend_unreported_prompts_total');
  const failed = requests(/^5/);
  const wait = firstTokens();
  const at = (part) => wait[Math.min(Math.floor(wait.length * part), wait.length - 1)];
  const tiles = [
    ['inflight', 'In flight', count(metric('tandem_frontend_inflight_requests')), 'admitted requests without a complete answer'],
    ['answered', 'Answered', count(requests(/^2/)), `${count(requests(/^4(?!99)/))} refused (4xx), ${count(requests('499'))} cancelled by clients`],
    ['failed', 'Failed', count(failed), 'requests that ended with 5xx', failed > 0],
    ['first_token', 'First token', wait.length > 0 ? duration(at(0.5)) : '–', wait.length > 0 ? `median of the last ${count(wait.length)}; 99%: ${duration(at(0.99))}` : 'no recent prompt'],
    ['prompt_tokens', 'Prompt tokens', count(prompt), 'of finished prompts'],
    ['cached_tokens', 'Cached tokens', count(cached), `${share(cached, prompt)} of prompt tokens`],
    ['completion_tokens', 'New tokens', count(metric('tandem_frontend_completion_tokens_total')), 'generated for finished prompts'],
    ['estimates', 'Estimates', count(estimates), 'prompts whose worker reported no cached tokens', estimates > 0],
  ];
  byId('tiles').replaceChildren(...tiles.map(([field, name, value, note, alarming]) =>
    el('div', { class: alarming ? 'tile alarming' : 'tile' },
      el('dt', { title: about(name) }, name), el('dd', { 'data-field': field }, value), el('dd', { class: 'about' }, note))));
}

function showCharts() {
  const hits = lines('cached', 'tokens');
  byId('legend').replaceChildren(...hits.map(({ name }) => el('li', {}, el('i', { class: `swatch ${colour(name)}` }), name)));
  const percent = (value) => `${Math.round(value * 100)}%`;
  lineChart(byId('hit-rate'), { series: hits, span: span(), max: 1, format: percent, what: 'Hit rate' });
  lineChart(byId('overlap-blocks'), { series: lines('overlap', 'prompts'), span: span(), format: brief, what: 'Overlap in blocks' });
}

// A hidden or paused page sends no requests. This function is called again when the page becomes visible or the pause ends.
async function updateLoop() {
  clearTimeout(timer);
  if (updating || paused || document.visibilityState !== 'visible') return;
  updating = true;
  try {
    await update();
  } catch (error) {
    setText(byId('state'), `${error.message}. The data is old; retrying.`);
    byId('state').className = 'bad';
  }
  updating = false;
  timer = setTimeout(updateLoop, PAUSE_MS);
}

byId('pause').addEventListener('click', () => {
  paused = !paused;
  byId('pause').setAttribute('aria-pressed', String(paused));
  setText(byId('pause'), paused ? 'Resume' : 'Pause');
  updateLoop();
});
document.addEventListener('visibilitychange', updateLoop);
new ResizeObserver(() => {
  showCharts();
  showScatter();
}).observe(byId('overlap'));
listenToRequests();
listenToTimeline();
listenToExplain();
addTooltips();
updateLoop();

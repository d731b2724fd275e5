// A conversation with the model over this frontend's API. Only this page stores it.

import { ask, keyRefused, reach } from './api.js';
import { copyButton } from './copy.js';
import { byId, count, counted, duration, el, offerModels, setText } from './dom.js';
import { showMarkdown } from './markdown.js';

const READY_MS = 5000;
// The page scrolls with an answer if the end of the conversation is at most this many pixels below the window.
const END_PX = 48;
const LOST = 'the connection to the server was lost';

let messages = [];
// The AbortController of the running request; null if there is none.
let running = null;

// Returns the events of a streamed answer, as objects.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === 'AbortError' ? error : new Error(LOST);
    });
    if (done) throw new Error(LOST);
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    for (const line of parts.filter((part) => part.startsWith('data: '))) {
      const data = line.slice('data: '.length);
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

// Returns the temperature to send if none is set; empty for the server's default. The default model of `tandem up` is so small that it loses the
// thread at the usual temperature; `tandem chat` has the same rule.
const usualTemperature = () => (byId('chat-model').value === 'SmolLM2-135M-Instruct' ? '0.2' : '');

function showTemperature() {
  byId('chat-temperature').placeholder = usualTemperature() || 'default';
}

async function request(signal) {
  const system = byId('chat-system').value.trim();
  const temperature = byId('chat-temperature').value || usualTemperature();
  const body = {
    model: byId('chat-model').value,
    messages: [...(system ? [{ role: 'system', content: system }] : []), ...messages],
    max_tokens: Number(byId('chat-max').value),
    ...(temperature === '' ? {} : { temperature: Number(temperature) }),
    stream: true,
    stream_options: { include_usage: true },
  };
  const headers = { 'content-type': 'application/json' };
  return (await ask('v1/chat/completions', { method: 'POST', headers, body: JSON.stringify(body), signal })).body;
}

// Calls `change`, and shows the end of the conversation if it was shown before.
function follow(change) {
  const view = byId('scroll');
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < END_PX;
  change();
  if (atEnd) view.scrollTop = view.scrollHeight;
}

function cost(usage, text, first, ms) {
  const seconds = (ms - first) / 1000;
  const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = usage;
  const speed = completion > 1 && seconds > 0 ? ` · ${count((completion - 1) / seconds)} tokens/s` : '';
  return el('div', { class: 'cost' },
    el('p', { class: 'note', 'data-field': 'usage', 'data-cached': String(details?.cached_tokens ?? '') },
      `${count(details?.cached_tokens)} of ${counted(prompt, 'prompt token')} cached · first token after ${duration(first)} · ${counted(completion, 'token')}${speed}`),
    copyButton('Copy the answer', () => text));
}

// Sends the conversation, and shows the answer in `place` as it arrives.
async function answer(place) {
  const began = performance.now();
  const thoughts = el('p', { class: 'quiet thoughts' });
  const shown = el('div', { class: 'text' });
  place.append(thoughts, shown);
  // A new conversation may begin before this answer has ended.
  const mine = messages;
  let text = '';
  let first = null;
  let usage = null;
  let frame = null;
  // The text is drawn at most once for each frame, however many tokens arrive.
  const show = () => follow(() => {
    frame = null;
    showMarkdown(shown, text);
  });
  running = new AbortController();
  try {
    for await (const event of events(await request(running.signal))) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const { content, reasoning_content: thought } = event.choices?.[0]?.delta ?? {};
      if (content || thought) first ??= performance.now() - began;
      text += content ?? '';
      if (thought) follow(() => thoughts.append(thought));
      if (content) frame ??= requestAnimationFrame(show);
    }
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error(`${first === null ? 'No answer' : 'The answer ended early'}: ${error.message}`);
  } finally {
    running = null;
    cancelAnimationFrame(frame);
    show();
    if (text) mine.push({ role: 'assistant', content: text });
    // A message without an answer is not sent again with the next one.
    else mine.pop();
  }
  if (usage) follow(() => place.append(cost(usage, text, first, performance.now() - began)));
}

async function send(message) {
  if (running || !message) return;
  const place = el('li', { 'aria-busy': 'true' }, el('p', { class: 'question' }, message));
  byId('empty').hidden = true;
  byId('conversation').append(place);
  byId('scroll').scrollTop = byId('scroll').scrollHeight;
  messages.push({ role: 'user', content: message });
  byId('chat-send').disabled = true;
  byId('chat-stop').disabled = false;
  // The focus must not stay on a button that has gone or is disabled. On a phone, it would open the keyboard.
  if (matchMedia('(hover: hover)').matches) byId('message').focus();
  try {
    await answer(place);
  } catch (error) {
    follow(() => place.append(el('p', { class: 'problem' }, error.name === 'AbortError' ? 'Stopped.' : error.message)));
  }
  place.removeAttribute('aria-busy');
  byId('chat-send').disabled = false;
  byId('chat-stop').disabled = true;
}

function clear() {
  running?.abort();
  messages = [];
  byId('conversation').replaceChildren();
  byId('empty').hidden = false;
  byId('message').focus();
}

async function showModels() {
  const { data } = await (await ask('v1/models')).json();
  const models = data.filter(({ owned_by: owner }) => owner !== 'passthrough').map(({ id }) => id);
  offerModels('chat', models);
  showTemperature();
  setText(byId('model'), models.join(', '));
}

// Shows whether the server is ready, and the models once they are known.
async function showState() {
  try {
    const { status } = await (await reach('ready', { cache: 'no-store' })).json();
    setText(byId('state'), status === 'ready' ? 'Ready' : `Not ready: ${status}`);
    byId('state').className = status === 'ready' ? 'good' : 'bad';
    if (byId('chat-model').options.length === 0 && !keyRefused) await showModels();
  } catch (error) {
    setText(byId('state'), error.message);
    byId('state').className = 'bad';
  }
}

function listen() {
  byId('chat-form').addEventListener('submit', (event) => {
    event.preventDefault();
    if (running) return;
    const message = byId('message').value.trim();
    byId('message').value = '';
    send(message);
  });
  byId('message').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId('chat-form').requestSubmit();
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') running?.abort();
  });
  byId('chat-stop').addEventListener('click', () => running?.abort());
  byId('chat-clear').addEventListener('click', clear);
  byId('key').addEventListener('change', showState);
  byId('chat-model').addEventListener('change', showTemperature);
  for (const example of byId('examples').querySelectorAll('button')) {
    example.addEventListener('click', () => send(example.textContent));
  }
}

listen();
showState();
setInterval(() => {
  if (document.visibilityState === 'visible') showState();
}, READY_MS);

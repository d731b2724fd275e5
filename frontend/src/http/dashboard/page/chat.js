// A conversation with the model over this frontend's API. It is held in this module only.

import { byId, count, duration, el } from './dom.js';

let messages = [];
// Ends the request that is under way; null if there is none.
let running = null;

// Returns the events of a streamed answer, as objects.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error('the connection was closed before the end of the answer');
    const parts = (rest + value).split('\n');
    rest = parts.pop();
    for (const line of parts.filter((part) => part.startsWith('data: '))) {
      const data = line.slice('data: '.length);
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

async function request(signal) {
  const key = byId('chat-key').value;
  const answer = await fetch('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...(key ? { authorization: `Bearer ${key}` } : {}) },
    body: JSON.stringify({
      model: byId('chat-model').value, messages, max_tokens: Number(byId('chat-max').value), stream: true, stream_options: { include_usage: true },
    }),
    signal,
  });
  if (answer.ok) return answer.body;
  if (answer.status === 401) byId('chat-key-part').hidden = false;
  const { error } = await answer.json();
  throw new Error(error.code === 'admin_port' ? 'this port serves no answers; open the page on the port of the API, or use `tandem chat`' : error.message);
}

// Sends the conversation, and shows the answer as it arrives.
async function answer(place) {
  const began = performance.now();
  const text = el('p', {});
  const reasoning = el('p', { class: 'quiet' });
  place.append(reasoning, text);
  let first = null;
  let usage = null;
  running = new AbortController();
  try {
    for await (const event of events(await request(running.signal))) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const { content, reasoning_content: thought } = event.choices?.[0]?.delta ?? {};
      if (content || thought) first ??= performance.now() - began;
      text.append(content ?? '');
      reasoning.append(thought ?? '');
    }
  } finally {
    running = null;
    if (text.textContent) messages.push({ role: 'assistant', content: text.textContent });
    // A message without an answer is not sent again with the next one.
    else messages.pop();
  }
  if (!usage) return;
  const seconds = (performance.now() - began - first) / 1000;
  const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = usage;
  const speed = completion > 1 && seconds > 0 ? ` · ${count((completion - 1) / seconds)} tokens/s` : '';
  place.append(el('p', { class: 'note', 'data-field': 'usage', 'data-cached': String(details?.cached_tokens ?? '') },
    `${count(details?.cached_tokens)} of ${count(prompt)} prompt tokens cached · first token after ${duration(first)} · ${count(completion)} tokens${speed}`));
}

async function send() {
  const message = byId('message').value.trim();
  if (running || !message) return;
  byId('message').value = '';
  const place = el('li', {}, el('p', { class: 'question' }, message));
  byId('conversation').append(place);
  messages.push({ role: 'user', content: message });
  byId('chat-send').disabled = true;
  byId('chat-stop').disabled = false;
  try {
    await answer(place);
  } catch (error) {
    place.append(el('p', { class: 'problem' }, error.name === 'AbortError' ? 'Stopped.' : `No answer: ${error.message}`));
  }
  byId('chat-send').disabled = false;
  byId('chat-stop').disabled = true;
}

export function listenToChat() {
  byId('chat-form').addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  // Enter sends the message; Shift and Enter begin a line.
  byId('message').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId('chat-form').requestSubmit();
  });
  byId('chat-stop').addEventListener('click', () => running?.abort());
  byId('chat-clear').addEventListener('click', () => {
    running?.abort();
    messages = [];
    byId('conversation').replaceChildren();
  });
}

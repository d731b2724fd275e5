// Requests to this server.

import { byId } from './dom.js';

// Whether the server has refused the key or the lack of one, and the key was not changed since.
export let keyRefused = false;

byId('key').addEventListener('change', () => {
  keyRefused = false;
});

// Fetches as `fetch` does. Each browser has its own text for a server that does not answer; here it is the same in all of them.
export async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Error('The server does not answer');
  }
}

// Sends a request to the API with the key, if there is one. Shows the field for the key if the server replies 401.
export async function ask(path, options = {}) {
  const key = byId('key').value;
  const answer = await reach(path, { ...options, headers: { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) } });
  if (answer.status === 401) {
    byId('key-part').hidden = false;
    keyRefused = true;
  }
  if (answer.ok) return answer;
  const { error } = await answer.json();
  throw new Error(error.message);
}

// A button that copies a text to the clipboard.

import { el, setText } from './dom.js';

const SHOWN_MS = 2000;

// Copies the text without the Clipboard API, which browsers offer only to pages over TLS or from this machine.
function copySelection(text) {
  const place = el('textarea', { readonly: true, class: 'unseen' });
  place.value = text;
  const focused = document.activeElement;
  document.body.append(place);
  place.select();
  const copied = document.execCommand('copy');
  place.remove();
  focused?.focus();
  return copied;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

// Returns a button that copies what `text()` returns. `what` is its name for screen readers.
export function copyButton(what, text) {
  const button = el('button', { type: 'button', class: 'copy', 'aria-label': what }, 'Copy');
  button.addEventListener('click', async () => {
    setText(button, (await copy(text())) ? 'Copied' : 'Select it and press Ctrl+C');
    setTimeout(() => setText(button, 'Copy'), SHOWN_MS);
  });
  return button;
}

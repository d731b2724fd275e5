// Elements and text formats. Data from the server becomes a text node or an attribute's value, never markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

// Changes a text only if it differs: screen readers announce every change in a live region.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Gives `parent` these children in this order. Children that stay in order are not moved, so that none loses the focus.
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const child of children) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat('en', { maximumSignificantDigits: 3 });

const compact = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

export const NOTHING = '–';

export function count(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

// Formats a number with its noun: `1 token`, `2 tokens`.
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}

// Formats a number in few characters, for axes and small labels.
export function brief(value) {
  return compact.format(value);
}

export function share(part, all) {
  return all > 0 ? `${((100 * part) / all).toFixed(1)}%` : NOTHING;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  return ms < 1000 ? `${short.format(ms)} ms` : `${short.format(ms / 1000)} s`;
}

export function bytes(value) {
  const units = ['B', 'KB', 'MB', 'GB', 'TB'];
  const step = value >= 1 ? Math.min(Math.floor(Math.log10(value) / 3), units.length - 1) : 0;
  return `${short.format(value / 1000 ** step)} ${units[step]}`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString([], { hour12: false });
}

// Orders workers: prefill workers first, and prefill-2 before prefill-10.
export function inOrder(one, other) {
  return other.role.localeCompare(one.role) || one.worker.localeCompare(other.worker, 'en', { numeric: true });
}

// A worker's colour is given by its index in the order in which this page first saw the workers, so the colour never changes.
const places = new Map();

export function colour(worker) {
  if (!places.has(worker)) places.set(worker, places.size);
  const place = places.get(worker);
  return `c${place % 8}${place >= 8 ? ' dashed' : ''}`;
}

// Offers these models in the form with this name. The choice is shown only if there are several.
export function offerModels(use, models) {
  const choice = byId(`${use}-model`);
  byId(`${use}-models`).hidden = models.length < 2;
  if ([...choice.options].map((option) => option.value).join('\n') === models.join('\n')) return;
  const chosen = choice.value;
  choice.replaceChildren(...models.map((model) => el('option', { value: model }, model)));
  if (models.includes(chosen)) choice.value = chosen;
}

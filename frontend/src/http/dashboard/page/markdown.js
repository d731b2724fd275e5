// Shows a model's text as Markdown: headings, lists, quotes, fences, emphasis, code and links. The text is not trusted: all of it becomes
// text nodes of elements that are created here, links lead only to http and https, and the depth and length of marks are bounded.

import { copyButton } from './copy.js';
import { el } from './dom.js';

const DEPTH_MAX = 6;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]{0,20})/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
// A mark has at most 500 characters. Without a limit, the time for a text of unclosed marks would grow with the square of its length.
const MARK = new RegExp([
  /(?<!`)(?<ticks>`{1,3})(?!`)(?<code>.{1,500}?)(?<!`)\k<ticks>(?!`)/,
  /\*\*(?=\S)(?<bold>.{1,500}?)(?<=\S)\*\*(?!\*)/,
  /(?<!\w)__(?=\S)(?<strong>.{1,500}?)(?<=\S)__(?!\w)/,
  /\*(?=[^\s*])(?<italic>.{1,500}?)(?<=[^\s*])\*(?!\*)/,
  /(?<!\w)_(?=[^\s_])(?<slanted>.{1,500}?)(?<=[^\s_])_(?!\w)/,
  /(?<!!)\[(?<label>[^[\]]{1,500})\]\((?<target>https?:\/\/[^\s()<>]{1,500})\)/,
  /\\(?<plain>[!-/:-@[-`{-~])/,
].map(({ source }) => source).join('|'), 'gs');

// Returns the nodes of a text within a line or a paragraph.
function inline(text, depth = 0) {
  if (depth > DEPTH_MAX) return [text];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(MARK)) {
    const { code, bold, strong, italic, slanted, label, target, plain } = found.groups;
    nodes.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (code !== undefined) nodes.push(el('code', {}, code.trim() || code));
    else if (label !== undefined) nodes.push(el('a', { href: target, target: '_blank', rel: 'noopener noreferrer' }, ...inline(label, depth + 1)));
    else if (plain !== undefined) nodes.push(plain);
    else if (bold ?? strong) nodes.push(el('strong', {}, ...inline(bold ?? strong, depth + 1)));
    else nodes.push(el('em', {}, ...inline(italic ?? slanted, depth + 1)));
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== '');
}

function fence(lines, language) {
  const code = lines.join('\n');
  return el('div', { class: 'code' },
    el('div', { class: 'code-head' }, el('span', {}, language || 'text'), copyButton('Copy the code', () => code)),
    el('pre', { tabindex: '0' }, el('code', {}, code)));
}

const indentation = (line) => line.length - line.trimStart().length;

// Returns the list whose lines these are. A line that is indented more than an item's mark belongs to that item.
function list(lines, depth) {
  const [, base, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= base.length + 1) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.slice(Math.min(indentation(line), base.length + mark.length + 1)));
  }
  const number = Number.parseInt(mark, 10);
  return el(Number.isNaN(number) ? 'ul' : 'ol', { start: number > 1 ? number : null },
    ...items.map((item) => el('li', {}, ...blocks(item, depth + 1).map(({ make }) => make()))));
}

// Returns the number of lines of the block that begins at `at`, and a function that makes its element.
function block(lines, at, depth) {
  const until = (ends) => {
    let end = at + 1;
    while (end < lines.length && !ends(lines[end])) end += 1;
    return end;
  };
  const line = lines[at];
  const fenced = FENCE.exec(line);
  if (fenced) {
    const closes = (other) => other.trim().startsWith(fenced[1]) && other.trim().replaceAll(fenced[1][0], '') === '';
    const end = until(closes);
    return [Math.min(end + 1, lines.length), () => fence(lines.slice(at + 1, end), fenced[2])];
  }
  const heading = HEADING.exec(line);
  // All headings have one level, because an answer may begin with any.
  if (heading) return [at + 1, () => el('h2', { class: heading[1].length < 3 ? 'large' : null }, ...inline(heading[2]))];
  if (RULE.test(line)) return [at + 1, () => el('hr')];
  if (ITEM.test(line) && depth < DEPTH_MAX) {
    const base = indentation(line);
    let blank = false;
    const end = until((other) => {
      const inside = other.trim() === '' || indentation(other) > base || (ITEM.test(other) && !RULE.test(other)) || (!blank && !startsBlock(other));
      blank = other.trim() === '';
      return !inside;
    });
    return [end, () => list(lines.slice(at, end), depth)];
  }
  if (QUOTE.test(line) && depth < DEPTH_MAX) {
    const end = until((other) => !QUOTE.test(other));
    const inner = lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, ''));
    return [end, () => el('blockquote', {}, ...blocks(inner, depth + 1).map(({ make }) => make()))];
  }
  const end = until((other) => other.trim() === '' || startsBlock(other));
  return [end, () => el('p', {}, ...inline(lines.slice(at, end).join('\n').trim()))];
}

const startsBlock = (line) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((start) => start.test(line));

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (lines[at].trim() === '') {
      at += 1;
      continue;
    }
    const [end, make] = block(lines, at, depth);
    found.push({ source: lines.slice(at, end).join('\n'), make });
    at = end;
  }
  return found;
}

// Shows the text in `place`. The elements of blocks that it showed before and that did not change stay, so that a text may grow.
export function showMarkdown(place, text) {
  const wanted = blocks(text.split('\n'), 0);
  wanted.forEach(({ source, make }, index) => {
    const old = place.children[index];
    if (old?.source === source) return;
    const made = make();
    made.source = source;
    if (old) old.replaceWith(made);
    else place.append(made);
  });
  while (place.children.length > wanted.length) place.lastElementChild.remove();
}

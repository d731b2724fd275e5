// Returns the problems with the look of the open page: texts, each with a problem and its element.
(() => {
  const CONTRAST_MIN = 4.5;
  const TARGET_MIN = 24;
  const problems = [];
  const name = (element) => `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ''}.${element.getAttribute('class') ?? ''} “${element.textContent.trim().slice(0, 40)}”`;
  const report = (problem, element) => problems.push(`${problem}: ${name(element)}`);
  // An open dialog covers the rest of the page.
  const top = document.querySelector('dialog[open]') ?? document.body;
  const shown = (element) => element.checkVisibility({ checkVisibilityCSS: true }) && !element.closest('.unseen, .skip');
  const elements = [...top.querySelectorAll('*')].filter(shown);

  if (document.documentElement.scrollWidth > window.innerWidth) {
    problems.push(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${window.innerWidth} px`);
  }

  // A text that is cut off must be in a container that scrolls, and the reader must see that it scrolls.
  const scrolls = (element) => ['auto', 'scroll'].includes(getComputedStyle(element).overflowX);
  const hasSign = (element) => element.matches('pre') || (element.matches('.wide') && (window.innerWidth > 736 || (element.previousElementSibling?.matches('.sideways') && shown(element.previousElementSibling))));
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim() !== '');
  for (const element of elements.filter(hasText)) {
    const range = document.createRange();
    range.selectNodeContents(element);
    const { left, right } = range.getBoundingClientRect();
    let edge = element.parentElement;
    while (edge && !['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(edge).overflowX)) edge = edge.parentElement;
    const outer = edge ? edge.getBoundingClientRect() : { left: 0, right: window.innerWidth };
    if (left >= outer.left - 1 && right <= outer.right + 1) continue;
    if (!edge || !scrolls(edge) || !hasSign(edge)) report('clipped', element);
  }

  // Whether it scrolls now depends on the lengths of names and numbers, so it must be reachable with the keyboard in any case.
  const focusable = (element) => element.tabIndex >= 0;
  for (const element of elements.filter(scrolls)) {
    if (!focusable(element) && ![...element.querySelectorAll('*')].some(focusable)) report('cannot be scrolled with the keyboard', element);
  }

  for (const element of elements.filter((element) => element.matches('a[href], button, input, select, textarea, summary'))) {
    const { width, height } = element.getBoundingClientRect();
    const inText = element.matches('a') && element.closest('p, li, blockquote') !== null;
    if (!inText && (width < TARGET_MIN || height < TARGET_MIN)) report(`a target of ${width.toFixed(1)} × ${height.toFixed(1)} px`, element);
  }

  const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
  const over = ([r, g, b, alpha = 1], back) => [r, g, b].map((part, at) => part * alpha + back[at] * (1 - alpha));
  const background = (element) => {
    if (!element) return parts(getComputedStyle(document.documentElement).colorScheme.includes('dark') && matchMedia('(prefers-color-scheme: dark)').matches ? 'rgb(18, 18, 18)' : 'rgb(255, 255, 255)');
    const own = parts(getComputedStyle(element).backgroundColor);
    return (own[3] ?? 1) === 1 ? own.slice(0, 3) : over(own, background(element.parentElement));
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const element of elements.filter((element) => hasText(element) && !element.matches(':disabled, :disabled *, title'))) {
    const style = getComputedStyle(element);
    const back = background(element);
    const front = over(parts(element instanceof SVGElement ? style.fill : style.color), back);
    const [light, dark] = [luminance(front), luminance(back)].sort((one, other) => other - one);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < CONTRAST_MIN) report(`contrast ${contrast.toFixed(2)}`, element);
  }
  return problems;
})()

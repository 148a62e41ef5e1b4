// Elements from data. Text is always text: what a store says is never markup.

import { age } from "./format.js";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export function show(id, isShown) {
  byId(id).hidden = !isShown;
}

// What `fill` puts into a node, without losing the focus in it.
export function refill(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  const key = focused?.dataset.key;
  node.replaceChildren(...children);
  if (!focused) return;
  const again = key ? node.querySelector(`[data-key="${CSS.escape(key)}"]`) : focused.isConnected ? focused : null;
  again?.focus({ preventScroll: true });
}

// A time that grows old on the page; `grow` is called every second.
export function ago(time, after = "") {
  const node = make("span", { "data-time": time, "data-after": after });
  freshen(node);
  return node;
}

let offset = 0;

export function setClock(now) {
  offset = now - Date.now() / 1000;
}

export function now() {
  return Date.now() / 1000 + offset;
}

function freshen(node) {
  const text = age(now() - Number(node.dataset.time)) + node.dataset.after;
  if (node.textContent !== text) node.textContent = text;
}

export function grow() {
  for (const node of document.querySelectorAll("[data-time]")) freshen(node);
}

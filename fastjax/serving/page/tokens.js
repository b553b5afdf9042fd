// Tokens of an answer: which part of the text is whose, and what the model held likely in its place.
//
// A token is [text, log-probability, [[text, log-probability], …]], the alternatives in order; a piece of text is
// [text, its tokens]. It has several tokens where only their bytes together are characters, and none where the text is
// nobody's.

import { byId, element } from "./dom.js";

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/**
 * Divide a text among the tokens that came with it, whose bytes are those of the text in order.
 *
 * A token that is not in the text, such as the end of a turn, is passed over. The white space that a token begins with
 * may be missing, and what a stop string has cut off.
 *
 * @param text of the event.
 * @param told the event's tokens, as `logprobs.content` of the API has them.
 * @returns {pieces, left}: the pieces, which joined are the text, and the tokens after the last one that has a piece.
 */
export function divide(text, told) {
  const bytes = encoder.encode(text);
  const pieces = [];
  let [start, end, used, group] = [0, 0, 0, []];
  told.forEach((token, index) => {
    const rest = bytes.subarray(end);
    const length = fitting(rest, Uint8Array.from(token.bytes ?? [])) || fitting(rest, encoder.encode(token.token));
    if (!length) return;
    used = index + 1;
    end += length;
    group.push([token.token, token.logprob, (token.top_logprobs ?? []).map((other) => [other.token, other.logprob])]);
    if (end === bytes.length || (bytes[end] & 0xc0) !== 0x80) {  // no character goes on here
      pieces.push([decoder.decode(bytes.subarray(start, end)), group]);
      [start, group] = [end, []];
    }
  });
  if (start < bytes.length) pieces.push([decoder.decode(bytes.subarray(start)), group]);
  return { pieces, left: told.slice(used) };
}

/** How many bytes at the beginning of the text are the token's; its broken characters are U+FFFD in both. */
function fitting(bytes, token) {
  if (!token.length) return 0;
  const begins = (whole, part) => part.length <= whole.length && part.every((byte, index) => byte === whole[index]);
  if (begins(bytes, token)) return token.length;
  let spaces = 0;
  while (token[spaces] === 0x20 || token[spaces] === 0x0a) spaces += 1;
  const trimmed = token.subarray(spaces);
  if (trimmed.length && begins(bytes, trimmed)) return trimmed.length;
  return begins(token, bytes) ? bytes.length : 0;
}

const tokensOf = new WeakMap();

/** Append a piece of text to an element. */
export function appendPiece(place, [text, tokens]) {
  if (!tokens.length) return place.append(text);
  const first = !place.querySelector(".token");
  const span = element("span", { className: "token", tabIndex: first ? 0 : -1, data: { level: level(tokens) } }, text);
  tokensOf.set(span, tokens);
  place.append(span);
}

/** From 0, the likeliest, to 4: the tint of a piece, by its least likely token. */
function level(tokens) {
  const probability = Math.exp(Math.min(...tokens.map(([, value]) => value ?? -Infinity)));
  return [0.8, 0.5, 0.2, 0.05].filter((bound) => probability < bound).length;
}

/** Show a token's alternatives at the pointer and at the keyboard's focus, for all answers inside an element. */
export function explainTokens(root) {
  const tip = byId("tip");
  let [shown, timer] = [null, 0];
  const show = (span) => {
    clearTimeout(timer);
    if (span === shown) return;
    hide();
    shown = span;
    span.setAttribute("aria-describedby", "tip");
    span.classList.add("shown");
    tip.replaceChildren(...tokensOf.get(span).map(explanation));
    tip.hidden = false;
    place(tip, span);
  };
  const hide = () => {
    clearTimeout(timer);
    tip.hidden = true;
    shown?.removeAttribute("aria-describedby");
    shown?.classList.remove("shown");
    shown = null;
  };
  const focused = () => (document.activeElement?.classList.contains("token") ? document.activeElement : null);
  const leave = () => {
    clearTimeout(timer);
    timer = setTimeout(() => (focused() ? show(focused()) : hide()), 150);
  };
  const at = (event) => event.target.closest?.(".token");
  root.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch" && at(event)) show(at(event)); });
  root.addEventListener("pointerout", (event) => { if (at(event)) leave(); });
  tip.addEventListener("pointerenter", () => clearTimeout(timer));
  tip.addEventListener("pointerleave", leave);
  root.addEventListener("focusin", (event) => {
    if (!at(event)) return hide();
    for (const other of at(event).parentElement.querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
    at(event).tabIndex = 0;
    show(at(event));
  });
  root.addEventListener("focusout", leave);
  root.addEventListener("keydown", (event) => { if (at(event)) move(event, at(event), hide); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  window.addEventListener("resize", hide);
  root.parentElement.addEventListener("scroll", () => {
    if (!shown) return;
    const [view, { top, bottom }] = [root.parentElement.getBoundingClientRect(), shown.getBoundingClientRect()];
    if (bottom < view.top || top > view.bottom) hide();
    else place(tip, shown);
  });
  return hide;
}

/** Move the focus among the tokens of an answer. */
function move(event, span, hide) {
  const all = [...span.parentElement.querySelectorAll(":scope > .token")];
  const index = all.indexOf(span);
  const goals = {
    ArrowLeft: () => all[Math.max(index - 1, 0)],
    ArrowRight: () => all[Math.min(index + 1, all.length - 1)],
    ArrowUp: () => inNextLine(span, all.slice(0, index).reverse()) ?? all[0],
    ArrowDown: () => inNextLine(span, all.slice(index + 1)) ?? all.at(-1),
    Home: () => all[0],
    End: () => all.at(-1),
  };
  if (!(event.key in goals) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  hide();
  goals[event.key]().focus();
}

/** Of tokens in order from one on: that of the next line that is nearest to be above or below it. */
function inNextLine(span, others) {
  const { top, left } = span.getBoundingClientRect();
  const boxes = others.map((other) => [other, other.getBoundingClientRect()]);
  const begin = boxes.findIndex(([, box]) => Math.abs(box.top - top) > 4);
  const line = begin < 0 ? [] : boxes.filter(([, box]) => Math.abs(box.top - boxes[begin][1].top) < 4);
  const distance = ([, box]) => Math.abs(box.left - left);
  return line.reduce((best, one) => (best === null || distance(one) < distance(best) ? one : best), null)?.[0];
}

/** A token's probability, and the alternatives with bars as long as theirs. */
function explanation([text, value, others]) {
  const listed = others.some(([other, its]) => other === text && its === value) ? others : [[text, value], ...others];
  const rows = listed.map(([other, its], index) => {
    const bar = element("i", { attributes: { "aria-hidden": "true" } });
    bar.style.inlineSize = `${100 * Math.exp(its ?? -Infinity)}%`;
    const chosen = other === text && listed.findIndex(([name]) => name === text) === index;
    return element("li", { className: chosen ? "chosen" : "" }, bar, element("code", {}, visible(other)),
      element("span", {}, percent(its)));
  });
  return element("div", { className: "explained" },
    element("p", {}, element("code", {}, visible(text)), element("b", {}, percent(value))),
    element("p", { className: "soft" }, impossible(value) ? "banned" : `log-probability ${value.toFixed(3).replace("-", "−")}`),
    element("ol", {}, ...rows));
}

/** A token with its white space to be seen. */
function visible(text) {
  return text === "" ? "(no text)" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** Whether a token cannot come; JSON has no infinity, the API has −9999 for it. */
const impossible = (value) => value === null || value <= -9999;

function percent(value) {
  if (impossible(value)) return "0 %";
  const share = 100 * Math.exp(value);
  if (share > 99.95 && share < 100) return "> 99.9 %";
  if (share < 0.01) return "< 0.01 %";
  return `${share.toFixed(share < 1 ? 2 : 1)} %`;
}

/** Put the tip above a token, or below it where there is no room, within the window. */
function place(tip, span) {
  const boxes = span.getClientRects();
  const box = boxes[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(8, Math.min(box.left + box.width / 2 - width / 2, innerWidth - width - 8));
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= 8 ? above : Math.min(boxes[boxes.length - 1].bottom + 8, innerHeight - height - 8)}px`;
}

// The conversation: turns of a message and the answers to it, by one model or by two side by side.
//
// Each model goes on from its own answers: an earlier turn that it did not answer has the first answer that there is.

import { Answer, joined, newRecord } from "./answers.js";
import { byId, element, keep, kept } from "./dom.js";
import { ServerError, chatEvents } from "./server.js";
import { SettingsError } from "./settings.js";
import { explainTokens } from "./tokens.js";

const ALTERNATIVES = 5;

export class Chat {
  constructor(settings, openSettings) {
    this.settings = settings;
    this.openSettings = openSettings;
    this.turns = [];
    this.stopping = null;  // an AbortController while answers come
    this.follow = true;
    this.hideTip = explainTokens(byId("turns"));
    this.watchComposer();
    this.watchScroll();
    this.restore();
    this.update();
    window.addEventListener("beforeunload", () => this.stop());
    window.addEventListener("pagehide", () => this.store());
  }

  /** Offer models; the choice is kept, where it is still served. */
  offer(models) {
    const names = models.map(({ id }) => id);
    const options = (all) => all.map(([value, text]) => element("option", { value }, text));
    const [model, beside] = [byId("model"), byId("beside")];
    const chosen = kept("models", {});
    model.replaceChildren(...options(names.map((name) => [name, name])));
    beside.replaceChildren(...options([["", "nothing"], ...names.map((name) => [name, name])]));
    model.value = names.includes(chosen.model) ? chosen.model : names[0] ?? "";
    beside.value = names.includes(chosen.beside) ? chosen.beside : "";
    byId("beside-pick").hidden = names.length < 2;
    model.onchange = beside.onchange = () => keep("models", { model: model.value, beside: beside.value });
  }

  watchComposer() {
    const prompt = byId("prompt");
    const grow = () => {
      prompt.style.blockSize = "auto";
      prompt.style.blockSize = `${Math.min(prompt.scrollHeight, innerHeight * 0.35)}px`;
    };
    prompt.addEventListener("input", () => { grow(); this.update(); });
    prompt.addEventListener("keydown", (event) => {
      const coarse = matchMedia("(pointer: coarse)").matches;  // a phone's Enter is a new line
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !coarse) {
        event.preventDefault();
        byId("composer").requestSubmit();
      }
      if (event.key === "Escape") this.stop();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping || prompt.value.trim() === "") return;
      const models = [...new Set([byId("model").value, byId("beside").value].filter(Boolean))];
      const request = this.checked(models);
      if (!request) return;
      const turn = this.addTurn({ said: prompt.value, answers: models.map(newRecord) });
      prompt.value = "";
      grow();
      this.follow = true;
      this.answer(turn, turn.cards, request);
    });
    byId("stop").addEventListener("click", () => { this.stop(); prompt.focus(); });
  }

  watchScroll() {
    const log = byId("log");
    log.addEventListener("scroll", () => {
      this.follow = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
      byId("to-end").hidden = this.follow;
    });
    byId("to-end").addEventListener("click", () => { this.follow = true; this.scroll(); });
    new ResizeObserver(() => this.scroll()).observe(byId("turns"));
  }

  scroll() {
    const log = byId("log");
    if (this.follow) log.scrollTop = log.scrollHeight;
  }

  /** The settings of a request; null, with the reason told, where one is wrong. */
  checked(models) {
    this.notice(null);
    try {
      if (!models.length) throw new SettingsError("The server has told no model yet.", byId("model"));
      return this.settings.read();
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      this.notice(error.message);
      if (this.settings.form.contains(error.field)) this.openSettings(error.field);
      return null;
    }
  }

  notice(sentence) {
    byId("notice").hidden = sentence === null;
    byId("notice").textContent = sentence ?? "";
  }

  addTurn({ said, answers }) {
    const turn = { said, cards: [] };
    turn.node = element("section", { className: "turn" },
      element("div", { className: "said" }, element("h3", { className: "unseen" }, "You"), said),
      element("div", { className: "answers" }));
    for (const record of answers) this.addCard(turn, record);
    turn.node.classList.toggle("two", answers.length > 1);
    this.turns.push(turn);
    byId("turns").append(turn.node);
    return turn;
  }

  addCard(turn, record, instead = null) {
    const card = new Answer(record, { retry: (old) => this.retry(turn, old), goOn: (old) => this.goOn(turn, old) });
    if (instead) {
      instead.node.replaceWith(card.node);
      turn.cards[turn.cards.indexOf(instead)] = card;
    } else {
      turn.node.lastChild.append(card.node);
      turn.cards.push(card);
    }
    return card;
  }

  retry(turn, old) {
    const request = this.checked([old.record.model]);
    if (request) this.again(turn, this.addCard(turn, newRecord(old.record.model), old), request);
  }

  goOn(turn, card) {
    const request = this.checked([card.record.model]);
    if (!request) return;
    card.begin();
    this.again(turn, card, request);
  }

  /** One answer of the last turn; the button that asked for it is gone, so the focus moves on. */
  again(turn, card, request) {
    this.answer(turn, [card], request);
    byId("stop").focus();
  }

  /** Let answers come, all at once. */
  async answer(turn, cards, request) {
    this.stopping = new AbortController();
    this.hideTip();
    this.update();
    await Promise.all(cards.map((card) => this.fetch(turn, card, request)));
    const stopFocused = document.activeElement === byId("stop");
    this.stopping = null;
    this.update();
    if (stopFocused) byId("prompt").focus();
    this.store();
  }

  async fetch(turn, card, { system, sampling }) {
    const begun = answered(card.record);
    const body = {
      model: card.record.model,
      messages: [...this.messages(turn, card.record.model, system), ...(begun ? [begun] : [])],
      ...(begun ? { continue_final_message: true } : {}),
      logprobs: true,
      top_logprobs: ALTERNATIVES,
      ...sampling,
    };
    try {
      for await (const event of chatEvents(body, this.stopping.signal)) card.add(event);
      card.end();
    } catch (error) {
      const stopped = error.name === "AbortError";
      if (!stopped && !(error instanceof ServerError)) console.error(error);
      card.end({ stopped, error: stopped ? null : error.message });
    }
  }

  /** The messages up to a turn, as a model sees them; turns without an answer are left out. */
  messages(last, model, system) {
    const messages = system.trim() === "" ? [] : [{ role: "system", content: system }];
    for (const { said, cards } of this.turns.slice(0, this.turns.indexOf(last))) {
      const records = cards.map(({ record }) => record).filter(answered);
      const record = records.find((one) => one.model === model) ?? records[0];
      if (record) messages.push({ role: "user", content: said }, answered(record));
    }
    return [...messages, { role: "user", content: last.said }];
  }

  stop() {
    this.stopping?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    byId("turns").replaceChildren();
    this.hideTip();
    this.notice(null);
    this.update();
    this.store();
    byId("prompt").focus();
  }

  update() {
    const running = this.stopping !== null;
    byId("welcome").hidden = this.turns.length > 0;
    byId("clear").disabled = !this.turns.length;
    byId("stop").hidden = !running;
    byId("send").hidden = running;
    byId("send").disabled = byId("prompt").value.trim() === "";
    for (const turn of this.turns) turn.node.classList.toggle("last", turn === this.turns.at(-1) && !running);
  }

  /** The conversation before a reload; an answer that was coming then is stopped. */
  restore() {
    try {
      for (const turn of kept("chat", [])) {
        for (const record of turn.answers) record.finish ??= "stopped";
        this.addTurn(turn);
      }
    } catch (error) {  // kept by another version of the page
      console.error(error);
      this.clear();
    }
  }

  /** Keep the conversation for a reload; without its alternatives where they are too much. */
  store() {
    const records = (thin) => this.turns.map(({ said, cards }) => ({ said, answers: cards.map(({ record }) => thin(record)) }));
    const plain = (pieces) => (pieces.length ? [[joined(pieces), []]] : []);
    const thinned = (one) => ({ ...one, reasoning: plain(one.reasoning), content: plain(one.content) });
    if (!this.turns.length) keep("chat", null);
    else if (!keep("chat", records((one) => one)) && !keep("chat", records(thinned))) keep("chat", null);
  }
}

/** An answer as a message; null: there is nothing of it. */
function answered({ content, reasoning }) {
  if (!content.length) return null;
  const thought = reasoning.length ? { reasoning_content: joined(reasoning) } : {};
  return { role: "assistant", content: joined(content), ...thought };
}

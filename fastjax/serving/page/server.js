// Requests to the server: its models, answers as they come, a run's rows. The key is asked for when it is needed.

import { byId, keep, kept } from "./dom.js";

const CUT = "The connection ended in the middle of the answer.";

/** A refusal or a failure, in a sentence for people. */
export class ServerError extends Error {}

/** The served models, the base first, then adapters: [{id, parent}]. */
export async function models() {
  const listed = (await (await request("/v1/models")).json()).data;
  return listed.map(({ id, parent }) => ({ id: String(id), parent: parent ?? null }));
}

/** The rows of the served run since an earlier answer; null: the server has none. */
export async function runRows(file, offset) {
  const response = await request(`/run?${new URLSearchParams({ file, offset })}`);
  return (await response.json()).run;
}

/** The events of a chat completion, parsed, as they come. */
export async function* chatEvents(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message ?? "The server failed in the middle of the answer.");
    yield event;
  }
  throw new ServerError(CUT);
}

/** The data of each event of a stream (HTML standard, "Server-sent events"). */
async function* serverSentEvents(stream) {
  let rest = "";
  for await (const text of decoded(stream)) {
    const events = (rest + text).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

/** A stream's text; not every browser iterates over streams. */
async function* decoded(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(CUT);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A response with status 200; asks for the key as often as it is refused. */
async function request(path, options = {}) {
  for (;;) {
    const key = kept("key", null);
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    const response = await answered(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new ServerError(await refusal(response));
    if (kept("key", null) === key) await askForKey(key !== null);  // another request may have asked meanwhile
  }
}

async function answered(path, options) {
  try {
    return await fetch(path, { ...options, credentials: "omit", cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
}

async function refusal(response) {
  const text = await response.text();
  let sentence = `The server answered with status ${response.status}.`;
  try {
    sentence = String(JSON.parse(text).error.message);
  } catch { /* not of the API's form */ }
  const wait = response.headers.get("Retry-After");
  return response.status === 429 && wait ? `${sentence} Try again in ${wait} s.` : sentence;
}

let asking = null;

/** Ask for the key, once for all requests that wait for it. */
function askForKey(wrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    byId("key-reason").textContent = wrong
      ? "That is not the server's key."
      : "It was set when the server was started. This tab keeps it until you close it.";
    field.value = "";
    let given = null;
    byId("key-form").onsubmit = () => { given = field.value.trim(); };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      if (!given) return reject(new ServerError("The server asks for its key."));
      keep("key", given);
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

"use strict";
const find = id => document.getElementById(id);
const talk = [];                       // what was said, as the API wants it
let key = "", asking = null;

function headers() {
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

function add(kind, text) {
  const box = document.createElement("article");
  box.className = kind;
  box.textContent = text;
  find("talk").append(box);
  box.scrollIntoView({block: "end"});
  return box;
}

async function reason(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `HTTP ${response.status}: ${text.slice(0, 300)}`; }
}

async function list() {
  const response = await fetch("/v1/models", {headers: headers()});
  find("key").hidden = response.status !== 401;
  if (!response.ok) {
    if (response.status !== 401) add("error", await reason(response));
    return;
  }
  const chosen = find("model").value, models = (await response.json()).data.map(model => model.id);
  find("model").replaceChildren(...models.map(name => new Option(name, name, false, name === chosen)));
  find("send").disabled = !models.length;
  if (!models.length) add("error", "No service is ready. Start one: hpc-serve submit. Then reload this page.");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read; !(read = await reader.read()).done;) {
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function show(box, answer, took) {
  const follows = innerHeight + scrollY > document.body.scrollHeight - 80;
  const parts = [];
  if (answer.thought) {
    const details = document.createElement("details");
    details.open = !answer.text;
    details.append(Object.assign(document.createElement("summary"), {textContent: "Thought"}), answer.thought);
    parts.push(details);
  }
  parts.push(answer.text);
  if (took) parts.push(Object.assign(document.createElement("small"), {textContent: took}));
  box.replaceChildren(...parts);
  if (follows) box.scrollIntoView({block: "end"});
}

async function ask(question) {
  add("user", question);
  talk.push({role: "user", content: question});
  const box = add("assistant", "…"), answer = {text: "", thought: ""}, began = performance.now();
  let first = 0, tokens = 0, ended = "";
  asking = new AbortController();
  find("send").textContent = "Stop";
  try {
    const body = {model: find("model").value, messages: talk, stream: true, stream_options: {include_usage: true}};
    const options = {method: "POST", headers: headers(), body: JSON.stringify(body), signal: asking.signal};
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error(await reason(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message || "The answer broke off.");
      const delta = event.choices?.[0]?.delta ?? {};
      answer.text += delta.content ?? "";
      answer.thought += delta.reasoning ?? delta.reasoning_content ?? "";
      first ||= delta.content || delta.reasoning || delta.reasoning_content ? performance.now() : 0;
      tokens = event.usage?.completion_tokens ?? tokens;
      show(box, answer, "");
    }
  } catch (error) {
    ended = error.name === "AbortError" ? "stopped" : error.message;
    if (error.name !== "AbortError") add("error", ended);
  }
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)}/s, first after ` +
    `${((first - began) / 1000).toFixed(2)} s` : "";
  show(box, answer, ended === "stopped" ? ended : rate);
  if (answer.text) talk.push({role: "assistant", content: answer.text}); else talk.pop();
  asking = null;
  find("send").textContent = "Send";
}

find("ask").addEventListener("submit", event => {
  event.preventDefault();
  const question = find("question").value;
  if (asking) return asking.abort();
  if (!question.trim() || find("send").disabled) return;
  find("question").value = "";
  ask(question);
});
find("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !asking) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
find("key").addEventListener("submit", event => {
  event.preventDefault();
  key = find("given").value.trim();
  find("given").value = "";
  list();
});
find("new").addEventListener("click", () => {
  asking?.abort();
  talk.length = 0;
  find("talk").replaceChildren();
});
list().catch(error => add("error", error.message));

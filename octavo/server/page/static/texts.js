// All texts of the page, by language and key. `{name}` is filled in.

const en = {
  monitor: "Monitor", chat: "Chat", settings: "Settings", inForce: "Settings in force", theme: "Theme", themeAuto: "Auto",
  themeLight: "Light", themeDark: "Dark", language: "Language", forgetKey: "Forget key",
  keyTitle: "API key", keyText: "This server asks for a key. It stays in this tab and is forgotten with it.",
  keyLabel: "Key", keyWrong: "The server does not take this key.", keySend: "Go on",
  context: "context {tokens} tokens", up: "up {time}",
  unreachable: "The server does not answer. Trying again…",
  refused: "The server answers: {message}", draining: "The server is shutting down.",

  output: "Output", input: "Input", ttft: "Time to first token", itl: "Inter-token latency",
  requestsNow: "Requests", kvUse: "KV cache in use", hitRate: "Prefix cache hits", acceptance: "Drafts accepted",
  perSecond: "tokens/s", total: "{n} tokens since start",
  within: "mean; 95% within {bound}", beyond: "mean; over 5% beyond {bound}",
  observed: "{n} in all, mean {mean}", none: "none yet",
  running: "running", waiting: "waiting", ended: "{n} ended, {aborted} of them aborted",
  preempted: "{n} preemptions", blocksUsed: "{used} of {all} blocks",
  hitTokens: "{hits} of {queries} tokens since start", window: "5 min",
  accepted: "{accepted} of {drafted} tokens; {length} tokens a step",

  outputRate: "Output, tokens/s", inputRate: "Input, tokens/s", ttftChart: "Time to first token, ms",
  itlChart: "Inter-token latency, ms", requestsChart: "Requests", kvChart: "KV cache in use, %",
  mean: "mean", now: "now", minutes: "−{n} min", seriesOutput: "output", seriesInput: "input", seriesUse: "in use",

  kvMap: "KV blocks", kvHost: "Host tier", free: "free", cached: "cached", owned: "in use", shared: "shared",
  kvSummary: "{blocks} blocks of {tokens} tokens, {bytes} in all; a cell is {cell}",
  oneBlock: "one block", someBlocks: "{n} blocks",
  kvHostSummary: "Host tier: {used} of {all} slots hold a block; {copies} blocks are on the device too.",
  kvNone: "This model has no KV cache.",

  memory: "Memory", weights: "Weights", kv_cache: "KV cache", tables: "Tables", activations: "Activations",
  graphs: "Recorded steps", other: "Other", freeMemory: "Free", host_cache: "Host tier", memoryTotal: "Device, total",
  memoryKind: "Held by", size: "Size", share: "Share", memoryNone: "Not measured.",

  requests: "Requests under way", requestsNone: "None.", requestsMore: "The first {shown} of {all}.",
  id: "Id", state: "State", prompt: "Prompt", out: "Output", reused: "Cached", age: "Age", preemptions: "Preempted",
  stateRunning: "running", stateWaiting: "waiting", stateLoading: "loading KV",
  tokens: "tokens",

  chatPlaceholder: "Write a message. Enter sends, Shift+Enter starts a new line.",
  completionPlaceholder: "Write the beginning of a text. Enter sends, Shift+Enter starts a new line.",
  send: "Send", stop: "Stop", clear: "Clear", sampling: "Sampling", modelName: "Model",
  systemPrompt: "System prompt", samplingNote: "What is left empty is as the server has it, shown in grey.",
  temperature: "Temperature", top_p: "Top p", top_k: "Top k", min_p: "Min p", max_tokens: "Max tokens",
  seed: "Seed", repetition_penalty: "Repetition penalty", presence_penalty: "Presence penalty",
  frequency_penalty: "Frequency penalty", stopText: "Stop at text", random: "random", limit: "full context",
  noEmbedding: "This model makes embeddings: ask it at /v1/embeddings.",
  noTokenizer: "This server has no tokenizer: send token ids to /v1/completions.",
  figures: "{tokens} tokens, {rate} tokens/s, first after {ttft}; prompt {prompt}, {cached} cached; {reason}",
  stopped: "stopped", reasonStop: "ended by itself", reasonLength: "reached its limit", failed: "Failed: {message}",

  facts: "Found at start", setting: "Setting", value: "Value", default: "Default", hidden: "set, not shown",
  showAll: "show those at their default too", allDefault: "Every setting is at its default.",
};

const zh = {
  monitor: "监控", chat: "对话", settings: "设置", inForce: "生效的设置", theme: "主题", themeAuto: "跟随系统",
  themeLight: "浅色", themeDark: "深色", language: "语言", forgetKey: "清除密钥",
  keyTitle: "API 密钥", keyText: "此服务器需要密钥。密钥只保存在当前标签页中，关闭后即被清除。",
  keyLabel: "密钥", keyWrong: "服务器不接受此密钥。", keySend: "继续",
  context: "上下文 {tokens} 个 token", up: "已运行 {time}",
  unreachable: "服务器没有响应，正在重试……",
  refused: "服务器返回：{message}", draining: "服务器正在关闭。",

  output: "输出", input: "输入", ttft: "首 token 延迟", itl: "token 间延迟",
  requestsNow: "请求", kvUse: "KV 缓存占用", hitRate: "前缀缓存命中率", acceptance: "草稿接受率",
  perSecond: "token/秒", total: "启动以来 {n} 个 token",
  within: "平均值；95% 不超过 {bound}", beyond: "平均值；超过 5% 大于 {bound}",
  observed: "共 {n} 次，平均 {mean}", none: "暂无",
  running: "运行中", waiting: "等待中", ended: "已结束 {n} 个，其中中止 {aborted} 个",
  preempted: "抢占 {n} 次", blocksUsed: "共 {all} 块，已用 {used} 块",
  hitTokens: "启动以来命中 {hits} / {queries} 个 token", window: "5 分钟",
  accepted: "接受 {accepted} / {drafted} 个 token；每步 {length} 个",

  outputRate: "输出（token/秒）", inputRate: "输入（token/秒）", ttftChart: "首 token 延迟（毫秒）",
  itlChart: "token 间延迟（毫秒）", requestsChart: "请求数", kvChart: "KV 缓存占用（%）",
  mean: "平均", now: "现在", minutes: "−{n} 分", seriesOutput: "输出", seriesInput: "输入", seriesUse: "占用",

  kvMap: "KV 块", kvHost: "主机层", free: "空闲", cached: "已缓存", owned: "使用中", shared: "共享",
  kvSummary: "共 {blocks} 块，每块 {tokens} 个 token，合计 {bytes}；每格代表{cell}",
  oneBlock: "一块", someBlocks: " {n} 块",
  kvHostSummary: "主机层：{all} 个槽位中 {used} 个存有块；其中 {copies} 块设备上也有。",
  kvNone: "此模型没有 KV 缓存。",

  memory: "内存", weights: "权重", kv_cache: "KV 缓存", tables: "表", activations: "激活值",
  graphs: "已录制的步骤", other: "其他", freeMemory: "空闲", host_cache: "主机层", memoryTotal: "设备总量",
  memoryKind: "用途", size: "大小", share: "占比", memoryNone: "未测量。",

  requests: "进行中的请求", requestsNone: "无。", requestsMore: "显示 {all} 个中的前 {shown} 个。",
  id: "编号", state: "状态", prompt: "提示", out: "输出", reused: "缓存命中", age: "已用时间", preemptions: "抢占",
  stateRunning: "运行中", stateWaiting: "等待中", stateLoading: "载入 KV",
  tokens: "token",

  chatPlaceholder: "输入消息。Enter 发送，Shift+Enter 换行。",
  completionPlaceholder: "输入一段文字的开头。Enter 发送，Shift+Enter 换行。",
  send: "发送", stop: "停止", clear: "清空", sampling: "采样参数", modelName: "模型",
  systemPrompt: "系统提示", samplingNote: "留空则使用服务器的默认值（灰色显示）。",
  temperature: "温度", top_p: "Top p", top_k: "Top k", min_p: "Min p", max_tokens: "最多 token 数",
  seed: "随机种子", repetition_penalty: "重复惩罚", presence_penalty: "存在惩罚",
  frequency_penalty: "频率惩罚", stopText: "停止文本", random: "随机", limit: "直到用尽",
  noEmbedding: "此模型用于生成向量：请使用 /v1/embeddings。",
  noTokenizer: "此服务器没有分词器：请向 /v1/completions 发送 token 编号。",
  figures: "{tokens} 个 token，{rate} token/秒，首 token {ttft}；提示 {prompt} 个，缓存命中 {cached} 个；{reason}",
  stopped: "已停止", reasonStop: "自然结束", reasonLength: "达到上限", failed: "失败：{message}",

  facts: "启动时的信息", setting: "设置", value: "值", default: "默认值", hidden: "已设置，不显示",
  showAll: "同时显示取默认值的设置", allDefault: "所有设置均为默认值。",
};

export const TEXTS = {en, zh};

let language = "en";

export function setLanguage(name) {
  language = name;
}

/** A text in the chosen language. */
export function text(key, values = {}) {
  return TEXTS[language][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** A number with the language's separators. */
export function number(value, digits = 0) {
  return new Intl.NumberFormat(language === "zh" ? "zh-CN" : "en-US", {
    minimumFractionDigits: digits, maximumFractionDigits: digits,
  }).format(value);
}

/** A number with about three digits. */
export function short(value) {
  return number(value, Number.isInteger(value) || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);
}

export function percent(share) {
  return `${number(100 * share, 1)}%`;
}

/** Seconds for people. */
export function seconds(value) {
  const zhText = language === "zh";
  if (value < 1) return `${short(1000 * value)}\u00a0${zhText ? "毫秒" : "ms"}`;
  if (value < 60) return `${short(value)}\u00a0${zhText ? "秒" : "s"}`;
  const [h, m, s] = [Math.floor(value / 3600), Math.floor(value / 60) % 60, Math.floor(value) % 60];
  if (zhText) return h ? `${h} 小时 ${m} 分` : `${m} 分 ${s} 秒`;
  return h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < 4; unit++) value /= 1024;
  return `${unit ? number(value, value < 100 ? 2 : 1) : number(value)} ${units[unit]}`;
}

// The AI SDK over the Responses API, streamed: `node ai_sdk.mjs URL NODE_MODULES`.
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, modules] = process.argv.slice(2);
const { resolve } = createRequire(`${modules}/x.js`);
const load = (name) => import(pathToFileURL(resolve(name)));
const { streamText, stepCountIs, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const tools = {
  read_file: tool({ inputSchema: z.object({ path: z.string() }), execute: async ({ path }) => readFileSync(path, "utf8") }),
  edit_file: tool({
    inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
    execute: async (edit) => {
      writeFileSync(edit.path, readFileSync(edit.path, "utf8").replaceAll(edit.old, edit.new));
      return "done";
    },
  }),
  run_command: tool({
    inputSchema: z.object({ command: z.string() }),
    execute: async ({ command }) => execSync(command).toString() || "done",
  }),
};
const prompt = "Replace hello in a.txt, then copy it to b.txt.";
const result = streamText({ model: openai("local"), tools, prompt, stopWhen: stepCountIs(8) });
for await (const part of result.textStream) process.stdout.write(part);

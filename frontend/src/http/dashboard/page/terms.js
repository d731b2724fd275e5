// The meaning of each term on this page, which is shown when the pointer rests on it.

import { el } from './dom.js';

const TERMS = {
  // The tiles.
  'In flight': 'Requests of this frontend that were admitted and are not answered completely',
  'Answered': 'Requests that ended with a status of 200 to 299, since the start of this frontend',
  'Failed': 'Requests that ended with a status of 500 to 599',
  'First token': 'Time from the arrival of a request to its first token (TTFT)',
  'Prompt tokens': 'Tokens of the prompts, cached or not',
  'Cached tokens': 'Prompt tokens whose KV was found in the cache of a worker, as that worker counted them',
  'New tokens': 'Generated tokens',
  'Estimates': 'Prompts whose worker reported no cached tokens: their usage has an estimate of the router',

  // The cluster.
  'Frontend and routers': 'Frontends serve the API; routers place each prompt on workers',
  'Prefill workers': 'Workers that compute the KV of prompts and send it to decode workers',
  'Decode workers': 'Workers that generate tokens; they may also compute prompts themselves',
  'Unavailable workers': 'Workers to which a router sends nothing, with its reason',
  'Counters of the workers': 'One row for each worker that a router knows',
  'ready': 'It can serve requests',
  'not ready': 'It cannot serve requests; the reason is shown',
  'healthy': 'All routers place requests on this worker',
  'partial': 'Not all routers know this worker',
  'unpaired': 'It computes prompts, but no decode worker can receive its KV',
  'circuit open': 'It receives no placements, because requests failed on it; it is tried again within 30 seconds',
  'incompatible': 'Its version, model, cluster or another setting does not fit to this cluster',
  'unreachable': 'No process answers at its address',
  'reconciles': 'The last audit found no difference between usage, ledgers and metrics',
  'not known': 'The result of the last audit cannot be read',

  // The table of the workers.
  'Worker': 'Id of the worker',
  'Prompts': 'Prompts that the worker computed, or found in its cache',
  'Hit rate': 'Cached tokens divided by prompt tokens',
  'Overlap blocks': 'Leading blocks of the placed prompts that the router knew on the worker',
  'Over': 'Tokens that the router predicted as cached, but that had to be computed',
  'Under': 'Tokens that were cached, but that the router did not predict',
  'Placements': 'Prompts that routers placed on the worker, by its part: prefill, decode, or both',
  'Index blocks': 'Blocks of the worker in the routers\u2019 index; ~: assumed, because its engine publishes no KV events',
  'Free': 'KV blocks that hold nothing',
  'Cached': 'KV blocks, or tokens of a prompt, that hold KV which a later prompt may reuse, or has reused',
  'In use': 'KV blocks of running requests',
  'Waiting': 'Requests in the queue of the worker',

  // The tables of requests.
  'Ended': 'Time at which the answer ended',
  'Request': 'Id of the request, which the client received as x-request-id, and index of the prompt',
  'Status': 'HTTP status of the answer',
  'Prompt': 'Tokens of the prompt',
  'New': 'Generated tokens',
  'Prefill': 'Worker that computed the prompt; as a stage of a request: the computation of the tokens that were not cached',
  'Decode': 'Worker that generated the tokens; as a stage of a request: all tokens after the first one',
  'Total': 'Time from the arrival of the request to the end of its answer',
  'Time': 'Time at which the request was refused',
  'Path': 'Path of the API',
  'Code': 'Code of the error that the client received',
  'Recent requests': 'Prompts of this frontend, the latest ones',
  'Refused requests': 'Requests of this frontend that were answered with an error before a prompt was admitted',
  'estimate': 'The worker reported no number; this one is the router\u2019s estimate',

  // Why tokens were not cached.
  'Possible': 'Tokens that some worker had cached, or was about to have',
  'Eligible': 'Tokens that a worker had cached that could have computed the prompt',
  'Expected': 'Tokens that the router expected in the cache of the chosen worker',
  'Found': 'Tokens that the engine of the chosen worker found in its cache',
  'Not found': 'The router expected these tokens, but the engine did not find them',
  'Group rule': 'Cached, but not reusable at this place: a window, a checkpoint, or a block that the engine drops',
  'Not yet stored': 'Another prompt computes this text now, or the report of its blocks is on its way',
  'Held elsewhere': 'Cached on a worker that was not chosen',
  'Evicted': 'Was cached, but the blocks were evicted, cleared, or lost with their worker',
  'Other namespace': 'Sent before with another account, salt or LoRA, which share no KV with this prompt',
  'New text': 'No worker is known to have had this text',
  'Below a block': 'The end of the prompt that fills no block, with its last token, which is always computed',
  'Prefix breakers': 'Clients that change the beginning of prompts which are otherwise equal',
  'Client': 'Key (key:NAME), or the program that the client names (agent:NAME)',
  'Model': 'Model that the client requested',
  'Changed prompts': 'Prompts that equal an earlier prompt of the client after a difference',
  'Lost tokens': 'Tokens after the difference in blocks that equal those of the earlier prompt',
  'First difference': 'Where prompts begin to differ, for most of the lost tokens',
  'Could be cached': 'Tokens of the prompt that workers had cached when it was placed',
  'Nearest prefix': 'Longest beginning of the prompt that a worker has or had cached',
  'On another worker': 'What another worker had cached beyond the chosen one, and what choosing it would have cost',
  'Regret': 'Computation that the eligible worker with the most cached tokens would have saved, estimated; waiting there may have cost more',

  // A request.
  'Stage': 'Part of the time from the arrival of a request to its end',
  'Start': 'Time from the arrival of the request',
  'Duration': 'Length of the stage',
  'Where': 'Process that did the work',
  'Chunk': 'Tokens of the prompt that one step of the engine computed',
  'Tokens': 'Tokens in the chunk',
  'Read and tokenize': 'The frontend reads the body and converts its text to tokens',
  'Route': 'The router chooses the workers',
  'Route and failed attempts': 'The router chooses the workers; attempts failed and were repeated on others',
  'Queue': 'The request waits until its worker begins the prefill',
  'KV transfer': 'KV moves from the prefill worker to the decode worker, while later blocks are computed',
  'First step': 'The decode worker computes the last token of the prompt and generates the first token',
  'Until its end': 'The request ended before its first token',
  'Endpoint': 'Path of the API; streamed: the client received the tokens one after the other',
  'Predicted overlap': 'Leading blocks of the prompt that the router expected in the cache of the worker',
  'Prefill worker': 'Worker that computed the prompt',
  'Decode worker': 'Worker that generated the tokens, at first if the answer was resumed',
  'Queue time on the decode worker': 'Time until the decode worker had free blocks for the KV of the prompt',
  'Failed attempts': 'Attempts that ended before a token was generated; the request was repeated on other workers',
  'Resumed on another worker': 'Workers on which the answer continued after its own was lost',

  // The costs of a placement.
  'Overlap': 'Leading blocks of the prompt that the router knows on the worker',
  'Predicted': 'Blocks that the router expects on the worker, including those of prompts that it just placed there',
  'Queued': 'Prompt tokens that wait on the worker',
  'chosen': 'The router would place the prompt here',
  'total ms': 'Estimated time until the first token, and by which others are delayed; the router chooses the smallest sum',
  'queue ms': 'Wait behind prompts that were placed before',
  'compute ms': 'Computation of the tokens that are not cached',
  'interference ms': 'Delay of others: prompts in the queue and to come, running answers, evicted blocks',
  'transfer ms': 'Time of the KV transfer that the prefill does not hide',
  'handoff ms': 'Fixed cost of moving a prompt from the prefill to the decode worker',
  'decode load ms': 'Delay by the answers that the decode worker generates',
};

// Returns the meaning of a term; null if it is no term of this page, such as the name of a worker.
export function about(term) {
  return TERMS[term] ?? null;
}

// Returns the head of a column.
export function head(term) {
  return el('th', { scope: 'col', title: about(term) }, term);
}

// Explains the terms in the page's own text.
export function addTooltips() {
  for (const place of document.querySelectorAll('thead th:not([title]), h2:not([title]), h3:not([title]), .badge:not([title])')) {
    const meaning = about(place.textContent);
    if (meaning) place.title = meaning;
  }
}

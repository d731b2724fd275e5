//! Runs an engine on one device, or on several devices, each of which computes one rank of the model.

pub(super) mod measure;
mod step;

use super::{
    CudaError, CudaLimits,
    buffers::Buffers,
    device::{Device, Memory, Purpose},
    graphs::{Bucket, Graphs},
    inputs::{self, Inputs},
    memory::{DeviceBudget, Sizes},
    model::Model,
    plan::{Batch, padded_rows, partitions_max, prompt_steps},
    pool::{KvShard, Pool},
    sampling::{LOGPROB_BYTES, SampleInputs},
    shape::Shape,
};
use std::{sync::Arc, time::Duration};
use step::Step;
use tandem_engine::{Chunk, Engine, EngineError, EngineInfo, Logits, SampleRequest, StepOutput};
use tandem_kv::{BlockId, KvMemory};

/// Number of layers that are enqueued on several ranks before the host waits for them. While about a thousand launches are pending, the
/// driver blocks further launches. If an all-reduce then waited for a lost rank, the host would be blocked without an error.
const LAYERS_IN_FLIGHT: usize = 32;
/// Time limit for planning GEMMs on one device, which usually takes a few seconds.
const PREPARE_MAX: Duration = Duration::from_secs(20);

/// Executes one worker's steps.
pub(super) struct Runner<D: Device> {
    /// The communicators of the ranks; `None` on one device, and after a rank was lost. When a rank is lost, the communicators are dropped
    /// before memory is freed, because that ends the all-reduces that wait for the lost rank.
    communicators: Option<D::Communicators>,
    /// The recorded CUDA graphs; `None` with several ranks, which launch every step kernel by kernel.
    graphs: Option<Graphs<D>>,
    ranks: Vec<Rank<D>>,
    limits: CudaLimits,
    sizes: Sizes,
    /// This is the last field, so that the weights are freed last. An aborted step may still read the weights, but freeing the buffers in
    /// the fields above waits until that step has ended.
    models: Arc<[Model<D>]>,
}

/// An engine's resources on one device.
struct Rank<D: Device> {
    /// The device, with a stream of this engine's own, so that engines on one device run concurrently.
    device: Arc<D>,
    buffers: Buffers<D>,
    inputs: Inputs<D>,
    kv: Arc<Memory<D>>,
}

impl<D: Device> Runner<D> {
    /// Allocates all memory that steps need and connects the ranks. `models` has one entry for each rank of the model.
    pub fn new(models: Arc<[Model<D>]>, limits: CudaLimits) -> Result<Self, CudaError> {
        let free_bytes = models.iter().map(|model| model.free_bytes).min().expect("a model has a rank");
        let communicator_bytes = if models.len() > 1 { D::COMMUNICATOR_BYTES } else { 0 };
        let budget = DeviceBudget { multiprocessors: models[0].device.multiprocessors(), free_bytes, communicator_bytes };
        let sizes = Sizes::new(&models[0].shape, &limits, budget)?;
        let purpose = if limits.urgent { Purpose::UrgentSteps } else { Purpose::Steps };
        let ranks = models.iter().map(|model| Rank::new(model, &sizes, purpose)).collect::<Result<Vec<_>, _>>()?;
        let devices: Vec<Arc<D>> = ranks.iter().map(|rank| Arc::clone(&rank.device)).collect();
        let communicators = (devices.len() > 1).then(|| D::connect_ranks(&devices)).transpose()?;
        if let Some(communicators) = &communicators {
            // The first all-reduce allocates memory and may fail. Therefore one all-reduce is done here, before any step. Its result is not
            // used.
            let streams: Vec<_> = ranks.iter().map(|rank| (&*rank.device, rank.buffers.residual.address())).collect();
            D::all_reduce_sum(communicators, &streams, models[0].shape.width)?;
            D::wait_all(&devices.iter().map(|device| &**device).collect::<Vec<_>>())?;
        }
        let rows_max = sizes.head_rows_max.min(limits.sequences_max as usize);
        let prompt_rows = limits.step_tokens_max as usize;
        ranks.iter().zip(&*models).try_for_each(|(rank, model)| rank.prepare(model, rows_max, prompt_rows))?;
        let graphs = (devices.len() == 1).then(|| Graphs::new(rows_max, sizes.partitions_max));
        Ok(Self { communicators, graphs, ranks, limits, sizes, models })
    }

    /// Records the graphs of all decode steps without logprobs and masks, so that no request waits for that. The recorded steps consist of
    /// padding, so they change no KV.
    pub fn with_recorded_graphs(mut self) -> Result<Self, CudaError> {
        let (shape, multiprocessors) = (*self.shape(), self.ranks[0].device.multiprocessors());
        let most_partitions = |rows| partitions_max(rows, &shape, multiprocessors);
        let buckets = self.graphs.as_ref().map(|graphs| graphs.buckets(most_partitions)).unwrap_or_default();
        // The first execution of a bucket launches its kernels directly, and the second one is recorded as a CUDA graph.
        for bucket in buckets.iter().flat_map(|bucket| [bucket; 2]) {
            self.execute(Batch::default(), SampleInputs::default(), &[], Some(*bucket))?;
        }
        Ok(self)
    }

    /// Returns the engine without CUDA graphs, so that it launches every step kernel by kernel.
    #[cfg(test)]
    pub fn without_graphs(mut self) -> Self {
        self.graphs = None;
        self
    }

    /// Replaces the buffers that can grow with empty buffers, so that steps reallocate them at other addresses.
    #[cfg(test)]
    pub fn with_empty_buffers(mut self) -> Self {
        for Rank { device, buffers, inputs, .. } in &mut self.ranks {
            *inputs = Inputs::new(device, 0).expect("the device has memory for an empty buffer");
            buffers.sampled = Memory::new(device, 0).expect("the device has memory for an empty buffer");
        }
        self
    }

    /// Returns the shape that each rank computes.
    pub fn shape(&self) -> &Shape {
        &self.models[0].shape
    }

    #[cfg(test)]
    pub fn device(&self) -> &D {
        &self.ranks[0].device
    }

    fn run(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, CudaError> {
        let info = self.describe();
        for chunk in chunks {
            info.check_chunk(chunk)?;
        }
        let batch = Batch::new(chunks, self.shape(), self.ranks[0].device.multiprocessors());
        let (tokens_max, sequences_max) = (self.limits.step_tokens_max as usize, self.limits.sequences_max as usize);
        if batch.rows() > tokens_max || batch.single_tokens > sequences_max {
            let (tokens, sequences) = (batch.rows(), batch.single_tokens);
            return Err(CudaError::StepTooLarge { tokens, sequences, tokens_max, sequences_max });
        }
        if chunks.is_empty() {
            return Ok(StepOutput::Sampled { tokens: Vec::new(), logits: Vec::new() });
        }
        let requests = chunks.iter().filter_map(|chunk| match chunk.logits {
            Logits::Sample(request) => Some(request),
            _ => None,
        });
        let requests: Vec<SampleRequest<'_>> = requests.collect();
        let sampling = SampleInputs::new(&requests, batch.offset_after_tables(), self.shape().vocab_size);
        let bucket = self.graphs.as_ref().and_then(|graphs| graphs.bucket(&batch, &sampling));
        self.execute(batch, sampling, &requests, bucket)
    }

    /// Executes a step, which is padded to the size of `bucket` if it has one.
    fn execute(
        &mut self,
        mut batch: Batch,
        mut sampling: SampleInputs,
        requests: &[SampleRequest<'_>],
        bucket: Option<Bucket>,
    ) -> Result<StepOutput, CudaError> {
        if let Some(bucket) = bucket {
            batch.pad(bucket.rows, bucket.partitions);
            sampling.pad(bucket.rows);
        }
        let results_bytes = sampling.rows().min(self.sizes.head_rows_max) * (1 + sampling.top_max()) * LOGPROB_BYTES;
        let Rank { device, buffers, .. } = &mut self.ranks[0];
        if buffers.sampled.bytes() < results_bytes {
            buffers.sampled = Memory::new(device, results_bytes.next_power_of_two())?;
        }
        let lists = self.ranks.iter_mut().map(|rank| rank.inputs.upload(&rank.device, &batch, &sampling));
        let lists = lists.collect::<Result<Vec<_>, _>>()?;
        let step = |(lists, (rank, model)): (_, (_, _))| {
            let Rank { device, buffers, kv, .. }: &Rank<D> = rank;
            Step { model, device: &**device, buffers, kv: kv.address(), batch: &batch, lists }
        };
        let steps: Vec<Step<'_, D>> = lists.into_iter().zip(self.ranks.iter().zip(&*self.models)).map(step).collect();
        let upload_masks = || match sampling.constrained.is_empty() {
            true => Ok(()),
            false => steps[0].upload_masks(&sampling, requests),
        };
        // After the layers, every rank has the residual stream. Only the first rank has the output head.
        let (first, layers) = (&steps[0], || layers(&steps, self.communicators.as_ref()));
        let (logits, mut tokens) = match (bucket, &mut self.graphs) {
            (Some(bucket), Some(graphs)) => {
                let Rank { device, inputs, buffers, .. } = &self.ranks[0];
                graphs.run(device, bucket, [inputs.memory.address(), buffers.sampled.address()], || {
                    layers()?;
                    if bucket.samples { first.sample(0, bucket.rows, bucket.top_max) } else { Ok(()) }
                })?;
                if !bucket.samples {
                    upload_masks()?;
                    first.sample(0, bucket.rows, bucket.top_max)?;
                }
                (Vec::new(), first.read(0, bucket.rows, &sampling)?)
            }
            _ => {
                layers()?;
                upload_masks()?;
                (first.logits(self.sizes.head_rows_max)?, first.sampled_tokens(self.sizes.head_rows_max, &sampling)?)
            }
        };
        tokens.truncate(requests.len());
        // Waits for all ranks. So the step's measured duration includes all of its work, and asynchronous errors are reported here.
        self.ranks.iter().try_for_each(|rank| rank.device.wait())?;
        Ok(StepOutput::Sampled { tokens, logits })
    }
}

/// Runs the embedding and all layers on all ranks. The result is the residual stream of all rows. If no logits are needed, the last layer
/// only writes its KV.
///
/// With several ranks, all work is done when this function returns. Until then no call may wait for a single rank, because the all-reduce
/// of one rank never ends if another rank is lost.
fn layers<'a, D: Device>(steps: &[Step<'a, D>], communicators: Option<&D::Communicators>) -> Result<(), CudaError> {
    let each =
        |work: fn(&Step<'a, D>, usize) -> Result<(), CudaError>, layer| steps.iter().try_for_each(|step| work(step, layer));
    let streams: Vec<(&D, u64)> = steps.iter().map(|step| (step.device, step.buffers.residual.address())).collect();
    let Step { batch, model, .. } = &steps[0];
    let all_reduce_sum = || match communicators {
        Some(communicators) => D::all_reduce_sum(communicators, &streams, batch.rows() * model.shape.width),
        None => {
            assert_eq!(steps.len(), 1, "a lost engine runs no more steps");
            Ok(())
        }
    };
    let devices: Vec<&D> = steps.iter().map(|step| step.device).collect();
    let settle = || if devices.len() > 1 { D::wait_all(&devices) } else { Ok(()) };
    steps.iter().try_for_each(Step::embed)?;
    for layer in 0..model.layers.len() {
        if layer > 0 && layer.is_multiple_of(LAYERS_IN_FLIGHT) {
            settle()?;
        }
        each(Step::keys, layer)?;
        if layer + 1 == model.layers.len() && batch.logit_rows.is_empty() && batch.sampled_rows.is_empty() {
            break;
        }
        each(Step::attention, layer)?;
        all_reduce_sum()?;
        each(Step::feed_forward, layer)?;
        all_reduce_sum()?;
    }
    settle()
}

impl<D: Device> Rank<D> {
    fn new(model: &Model<D>, sizes: &Sizes, purpose: Purpose) -> Result<Self, CudaError> {
        let device = Arc::new(model.device.new_stream(purpose)?);
        let buffers = Buffers::new(&device, sizes, model.shard)?;
        let inputs = Inputs::new(&device, inputs::BYTES)?;
        let kv = Arc::new(Memory::new(&device, sizes.capacity_blocks as usize * model.shape.block_bytes())?);
        Ok(Self { device, buffers, inputs, kv })
    }

    /// Plans the GEMMs of full prompt steps, and of decode steps with every padded number of rows.
    fn prepare(&self, model: &Model<D>, rows_max: usize, prompt_rows: usize) -> Result<(), CudaError> {
        let mut all_rows: Vec<usize> = (1..=rows_max).map(|rows| padded_rows(rows).min(rows_max)).collect();
        all_rows.dedup();
        let of_layers = |rows| self.buffers.gemms_of_layers(model, rows);
        let decode = all_rows.into_iter().flat_map(|rows| {
            let (head, operands) = self.buffers.head_gemm(model, rows);
            let head = (model.shard.rank == 0).then(|| (head, vec![operands]));
            of_layers(rows).into_iter().chain(head)
        });
        let prompts = prompt_steps(prompt_rows).flat_map(of_layers);
        self.device.prepare(&decode.chain(prompts).collect::<Vec<_>>(), PREPARE_MAX)
    }

    /// Returns the address of this rank's shard of a block.
    fn block(&self, shape: &Shape, block: BlockId) -> u64 {
        let at = block.0 as usize * shape.block_bytes();
        assert!(at < self.kv.bytes(), "the block is in the KV memory");
        self.kv.address() + at as u64
    }
}

impl<D: Device> Engine for Runner<D> {
    fn describe(&self) -> EngineInfo {
        EngineInfo {
            vocab_size: self.shape().vocab_size,
            context_length: self.models[0].context_length,
            block_size: self.shape().block_size as u32,
            capacity_blocks: self.sizes.capacity_blocks,
            block_bytes: self.ranks.len() * self.shape().block_bytes(),
        }
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let output = self.run(chunks).map_err(EngineError::from);
        if matches!(output, Err(EngineError::Lost(_))) {
            self.communicators = None;
        }
        output
    }

    fn refused_graphs(&self) -> u64 {
        self.graphs.as_ref().map_or(0, Graphs::refused)
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        assert_eq!(into.len(), self.describe().block_bytes, "the destination has the size of a block");
        let shape = self.shape();
        if let [rank] = &*self.ranks {
            return Ok(rank.device.download(rank.block(shape, block), into)?);
        }
        let mut part = vec![0; shape.block_bytes()];
        for (rank, model) in self.ranks.iter().zip(&*self.models) {
            rank.device.download(rank.block(shape, block), &mut part)?;
            model.shard.merge_into(&part, shape.kv_row_bytes(), into);
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        assert_eq!(bytes.len(), self.describe().block_bytes, "the source has the size of a block");
        let shape = self.shape();
        if let [rank] = &*self.ranks {
            return Ok(rank.device.upload(rank.block(shape, block), bytes)?);
        }
        for (rank, model) in self.ranks.iter().zip(&*self.models) {
            let part = model.shard.extract(bytes, shape.kv_row_bytes());
            rank.device.upload(rank.block(shape, block), &part)?;
        }
        Ok(())
    }

    fn kv_memory(&self) -> Option<Arc<dyn KvMemory>> {
        let shard =
            |rank: &Rank<D>| Ok(KvShard { device: Arc::new(rank.device.new_stream(Purpose::Copies)?), kv: Arc::clone(&rank.kv) });
        let shards: Result<_, CudaError> = self.ranks.iter().map(shard).collect();
        let shards = shards
            .inspect_err(|error| tracing::warn!(%error, "KV cannot be copied from GPU to GPU; it takes the slower path through host memory"))
            .ok()?;
        Some(Arc::new(Pool::new(shards, self.shape().block_bytes(), self.sizes.capacity_blocks)))
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), EngineError> {
        let shape = self.shape();
        for rank in &self.ranks {
            rank.device.copy(rank.block(shape, from), rank.block(shape, to), shape.block_bytes())?;
        }
        Ok(())
    }
}

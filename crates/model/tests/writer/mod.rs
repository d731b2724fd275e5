//! Writes GGUF files for tests.

/// The numbers of tensor types in GGUF.
pub mod kind {
    #![allow(dead_code, missing_docs, reason = "shared by several test crates, which use different parts")]
    pub const F32: u32 = 0;
    pub const F16: u32 = 1;
    pub const Q4_0: u32 = 2;
    pub const Q4_1: u32 = 3;
    pub const Q5_0: u32 = 6;
    pub const Q8_0: u32 = 8;
    pub const Q4_K: u32 = 12;
    pub const Q6_K: u32 = 14;
    pub const BF16: u32 = 30;
}

#[derive(Clone, Default)]
pub struct Writer {
    metadata: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<TensorBytes>,
}

#[derive(Clone)]
struct TensorBytes {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
}

#[allow(dead_code, reason = "shared by several test crates, which use different parts")]
impl Writer {
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.metadata.retain(|(known, ..)| known != key);
        self.metadata.push((key.to_owned(), kind, value.to_vec()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(known, ..)| known != key);
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[value.into()])
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &text(value))
    }

    pub fn strs(self, key: &str, values: &[&str]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        self.raw(key, 9, &[&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &items].concat())
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &[&5u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &items].concat())
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, 9, &[&6u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &items].concat())
    }

    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) -> Self {
        self.tensors.retain(|known| known.name != name);
        self.tensors.push(TensorBytes { name: name.to_owned(), shape: shape.to_vec(), kind, data });
        self
    }

    pub fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|known| known.name != name);
        self
    }

    pub fn finish(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            file.extend(text(key));
            file.extend(kind.to_le_bytes());
            file.extend(value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            file.extend(text(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            file.extend(tensor.shape.iter().flat_map(|dimension| dimension.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(offset.to_le_bytes());
            offset += (tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(32), 0);
            file.extend(&tensor.data);
        }
        file
    }
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

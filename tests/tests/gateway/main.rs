//! Tests of an endpoint picker. The test is the gateway: it speaks Envoy's protocol for external processors with the picker, and HTTP with the
//! chosen servers, which are fake vLLM servers.

mod encrypted;
mod envoy;
mod protocol;
mod reference;
mod rig;
mod routing;

//! A wrapper that counts and times the operations of every kind of key provider in the same way.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::{GivenKey, KeyProvider};
use crate::metrics;

/// The wrapper; see the module.
pub struct Measured {
    /// The provider's id, as the label: names may change.
    pub provider: String,
    /// The provider.
    pub inner: Arc<dyn KeyProvider>,
}

#[async_trait]
impl KeyProvider for Measured {
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem> {
        let began = Instant::now();
        let outcome = self.inner.create_key(vm, request).await;
        metrics::get().key_operation(&self.provider, "create", began, outcome)
    }

    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem> {
        let began = Instant::now();
        let outcome = self.inner.get_key(vm, key).await;
        metrics::get().key_operation(&self.provider, "get", began, outcome)
    }

    async fn reference_of(&self, vm: VmId, key_id: &str) -> Result<KeyReference, Problem> {
        let began = Instant::now();
        let outcome = self.inner.reference_of(vm, key_id).await;
        metrics::get().key_operation(&self.provider, "get", began, outcome)
    }

    async fn destroy_key(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        let began = Instant::now();
        let outcome = self.inner.destroy_key(vm, vm_name, key).await;
        metrics::get().key_operation(&self.provider, "destroy", began, outcome)
    }

    async fn abandon(&self, request: Uuid) -> Result<(), Problem> {
        self.inner.abandon(request).await
    }

    fn known_fault(&self) -> Option<Problem> {
        self.inner.known_fault()
    }

    fn known_fault_of(&self, key_id: &str) -> Option<Problem> {
        self.inner.known_fault_of(key_id)
    }
}
